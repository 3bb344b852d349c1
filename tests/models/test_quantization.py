"""Quantised weights: held as asked, the same ids whatever speculates, and refused where no kernel does it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.config import QUANTIZATIONS
from specdec.kernels import native
from specdec.models import profile
from specdec.models.forward_batch import Segment
from tests import engines
from tests.toys import make_toy

pytestmark = pytest.mark.skipif(not native.enabled(), reason="no C++ compiler")

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9, 8, 7], list(range(60, 100)), [5] * 20]


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A family without a native forward: its linears are replaced one by one."""
    return make_toy(tmp_path_factory.mktemp("toys") / "neox", "gpt_neox", seed=3)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("int4", "float32"), ("int8", "bfloat16"), ("int4-a8", "bfloat16"), ("int8-a8", "float32")],
)
def test_ids_are_those_of_plain_decoding_whatever_speculates(toy: str, quantization: str, dtype: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    plain = engines.ids(engines.llm(toy, None, **options), PROMPTS, max_tokens=24, ignore_eos=True)
    alone = [engines.ids(engines.llm(toy, None, **options), [p], max_tokens=24, ignore_eos=True)[0] for p in PROMPTS]
    assert plain == alone
    for draft in ("ngram", toy):
        made = engines.llm(toy, draft, 4, **options)
        outputs = made.generate(PROMPTS, specdec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in outputs] == plain
        if draft == toy:
            assert all(o.stats.num_accepted_tokens == o.stats.num_draft_tokens > 0 for o in outputs)


def test_a_family_without_a_native_forward_is_quantised_too(neox: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8-a8"}
    plain = engines.ids(engines.llm(neox, None, **options), PROMPTS, max_tokens=16, ignore_eos=True)
    assert plain == engines.ids(engines.llm(neox, "ngram", 4, **options), PROMPTS, max_tokens=16, ignore_eos=True)


def test_what_a_step_costs_is_kept_for_each_way_weights_are_held(toy: str) -> None:
    ways = ("none", "int4", "int8", "int4-a8")
    runners = [engines.llm(toy, None, dtype="float32", quantization=way).engine.target for way in ways]
    assert len({profile._key(runner, 64) for runner in runners}) == len(ways)


def _scores(path: str, quantization: str) -> torch.Tensor:
    made = engines.llm(path, None, dtype="float32", quantization=quantization)
    runner = made.engine.target
    return runner.forward(runner.pack([Segment(PROMPTS[2], 0, [0, 1, 2], len(PROMPTS[2]))]))


def test_eight_bits_are_nearer_to_the_model_than_four_and_inputs_in_bytes_cost_little(toy: str) -> None:
    whole = _scores(toy, "none")
    error = {q: float((_scores(toy, q) - whole).norm() / whole.norm()) for q in QUANTIZATIONS}
    assert error["none"] == 0 < error["int8"] < error["int8-a8"] < 0.1
    assert 3 * error["int8-a8"] < error["int4"] < 0.5
    assert error["int4-a8"] < 1.5 * error["int4"]


def test_weights_made_of_codes_lose_nothing(tmp_path: Path) -> None:
    """A checkpoint converted from Q8_0: int8 gives its very scores, from codes."""
    path = make_toy(tmp_path / "toy")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            grouped = tensor.view(len(tensor), -1, 32)
            d = (grouped.abs().amax(-1, keepdim=True) / 127).half().double()
            tensors[name] = ((grouped / d).round().clamp(-127, 127) * d).view(tensor.shape)
    save_file({k: v.float() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    assert torch.equal(_scores(path, "int8"), _scores(path, "none"))
    assert not torch.equal(_scores(path, "int4"), _scores(path, "none")), "negative control: four bits do lose"


def test_what_the_weights_take_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_toy(tmp_path / "toy")
    with caplog.at_level(logging.INFO, logger="specdec"):
        specdec.LLM(path, None, quantization="int4", num_kv_blocks=8)
    assert "4-bit codes" in caplog.text and "quantization int4" in caplog.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantization": "int3"}, "quantization is 'int3'; it must be one of none, int4"),
        ({"quantization": "int4", "dtype": "float64"}, "kernels compute in float32 or bfloat16"),
    ],
)
def test_what_cannot_be_done_is_refused(toy: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        specdec.LLM(toy, None, num_kv_blocks=8, **options)


def test_without_native_kernels_it_is_refused_and_so_is_a_model_that_no_group_fits(toy: str, tmp_path: Path) -> None:
    with native.disabled(), pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        specdec.LLM(toy, None, num_kv_blocks=8, dtype="float32", quantization="int8")
    odd = make_toy(tmp_path / "odd", hidden_size=48, intermediate_size=72, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(specdec.SpecdecError, match="nothing would be quantised"):
        specdec.LLM(odd, None, num_kv_blocks=8, quantization="int8")
