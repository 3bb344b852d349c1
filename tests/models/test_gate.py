"""The load gate: what would be computed wrongly is refused, whatever the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import specdec
from specdec.config import ModelConfig
from specdec.kernels import native
from specdec.models import attention, fast_llama, selftest
from specdec.models.gate import check_config
from specdec.models.loader import load
from specdec.models.selftest import TOLERANCE, measure, self_test
from specdec.models.shrink import shrink
from tests.toys import make_toy

WINDOWED = {
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken bridge must never leave a mark that says it passed."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))


def _config(family: str, **overrides: Any) -> Any:
    return shrink(AutoConfig.for_model(family, **overrides))


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "opt"]
)
def test_families_that_are_right_pass(family: str) -> None:
    assert measure(_config(family)) < TOLERANCE


def _mask_off_by_one(
    q: Any, k: Any, v: Any, tables: Any, seq_lens: Any, cu: Any, *rest: Any, **more: Any
) -> torch.Tensor:
    """Every query sees one position less where it can."""
    return _right(q, k, v, tables, (seq_lens - 1).clamp(min=1), cu, *rest, **more)


def _window_off_by_one(
    q: Any, k: Any, v: Any, tables: Any, seq_lens: Any, cu: Any, scale: Any, window: Any, *rest: Any, **more: Any
) -> torch.Tensor:
    return _right(q, k, v, tables, seq_lens, cu, scale, window + 1 if window else window, *rest, **more)


def _neighbours_table(
    q: Any, k: Any, v: Any, tables: Any, seq_lens: Any, cu: Any, *rest: Any, **more: Any
) -> torch.Tensor:
    """The second request reads the first one's blocks."""
    return _right(q, k, v, tables[:1].expand_as(tables).contiguous(), seq_lens, cu, *rest, **more)


_right = attention.paged_attention
BROKEN = {
    "mask off by one": (_mask_off_by_one, "gemma3_text"),
    "window off by one": (_window_off_by_one, "gemma3_text"),
    "neighbour's blocks": (_neighbours_table, "gemma3_text"),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_bridge_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, family = BROKEN[fault]
    config = AutoConfig.for_model(family, **WINDOWED)
    self_test(config)
    monkeypatch.setattr(attention, "paged_attention", wrong)
    monkeypatch.setattr(selftest, "_sources", lambda: fault)  # what a changed source file would do
    with pytest.raises(specdec.UnsupportedModelError, match="differs from transformers' eager attention"):
        self_test(config)


def test_positions_that_leak_between_neighbours_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that numbers the packed tokens from the start of the batch."""
    original = selftest.ModelRunner.pack

    def pack(self: Any, segments: Any) -> Any:
        batch = original(self, segments)
        object.__setattr__(batch, "positions", torch.arange(batch.num_tokens))
        return batch

    monkeypatch.setattr(selftest.ModelRunner, "pack", pack)
    with pytest.raises(specdec.UnsupportedModelError, match="served wrongly"):
        self_test(AutoConfig.for_model("llama"))


def test_a_broken_native_forward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.enabled():
        pytest.skip("the native kernels are not built here")
    original = fast_llama._layer

    def swapped(layer: Any, settings: Any) -> Any:
        right = original(layer, settings)
        object.__setattr__(right, "input_norm", right.post_norm)
        return right

    monkeypatch.setattr(fast_llama, "_layer", swapped)
    with pytest.raises(specdec.UnsupportedModelError, match="served wrongly"):
        self_test(AutoConfig.for_model("llama"))


def test_a_passed_family_is_remembered_and_a_change_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(selftest, "measure", lambda small: calls.append(small) or 0.0)
    self_test(AutoConfig.for_model("llama"))
    self_test(AutoConfig.for_model("llama"))
    assert len(calls) == 1
    self_test(AutoConfig.for_model("llama", attention_bias=True))
    assert len(calls) == 2
    monkeypatch.setattr(selftest, "_sources", lambda: "changed")
    self_test(AutoConfig.for_model("llama"))
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("phi3", {"rope_parameters": {**LONGROPE, "rope_theta": 1e4}}, "longrope"),
        ("llama4_text", {}, "chunked_attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("mamba2", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
    ],
)  # fmt: skip
def test_what_a_config_already_tells_is_refused(family: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(specdec.UnsupportedModelError, match=reason):
        check_config(AutoConfig.for_model(family, **overrides))


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "gpt_neo", "diffllama"])
def test_layers_that_bypass_the_bridge_are_refused(family: str) -> None:
    with pytest.raises(specdec.UnsupportedModelError, match="attention"):
        measure(_config(family))


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_static_rope_types_equal_eager_beyond_the_original_length(rope: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10_000.0, "factor": 4.0}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if rope == "yarn":
        parameters |= {"original_max_position_embeddings": 32, "attention_factor": 1.3}
    path = make_toy(tmp_path / rope, rope_parameters=parameters, max_position_embeddings=128)
    from tests.test_engine import _transformers_ids

    prompt = [[(7 * i) % 250 for i in range(100)]]
    expected = _transformers_ids(path, prompt, 20)
    for dtype in ("float64", "float32"):
        made = specdec.LLM(path, "ngram", dtype=dtype, num_kv_blocks=16)
        out = made.generate(prompt, specdec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in out] == expected


def test_the_native_forward_is_used_where_it_qualifies_and_only_there(tmp_path: Path) -> None:
    if not native.enabled():
        pytest.skip("the native kernels are not built here")
    path = make_toy(tmp_path / "llama")
    assert load(ModelConfig(model=path, dtype="float32")).fast is not None
    assert load(ModelConfig(model=path, dtype="float64")).fast is None
    with native.disabled():
        assert load(ModelConfig(model=path, dtype="float32")).fast is None
    assert load(ModelConfig(model=make_toy(tmp_path / "bias", mlp_bias=True), dtype="float32")).fast is None
    assert load(ModelConfig(model=make_toy(tmp_path / "relu", hidden_act="relu"), dtype="float32")).fast is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_with_and_without_native_code_the_ids_are_the_same(family: str, tmp_path: Path) -> None:
    path = make_toy(tmp_path / family, family, **({"sliding_window": 9} if family == "mistral" else {}))
    prompts = [[1, 2, 3], [(5 * i) % 250 for i in range(40)]]
    params = specdec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def run() -> list[list[int]]:
        made = specdec.LLM(path, "ngram", dtype="float32", num_kv_blocks=32)
        return [o.outputs[0].token_ids for o in made.generate(prompts, params, progress=False)]

    fast = run()
    with native.disabled():
        assert run() == fast
