"""The engine on Triton kernels: the twins' ids, steps that can be recorded, one read a step."""

from __future__ import annotations

import pytest
import torch
from recording import FakeCapture, HostReads

from specdec.config import ModelConfig
from specdec.kernels import dispatch
from specdec.llm import LLM
from specdec.models.forward_batch import Segment
from specdec.models.graphs import GraphedForward
from specdec.models.loader import load
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from tests.toys import make_toy

interpreted = pytest.mark.skipif(dispatch.mode() != "interpret", reason="records what the interpreter launches")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer, so that the interpreter has little to do."""
    return make_toy(tmp_path_factory.mktemp("toys") / "tiny", num_hidden_layers=1)


def build(directory: str, draft: str | None) -> LLM:
    return LLM(directory, draft, dtype="float64", num_kv_blocks=32, block_size=16)


def generate(llm: LLM, **params: object) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True, **params), progress=False)  # type: ignore
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("draft", "temperature"), [(None, 0.9), ("ngram", 0.0), ("ngram", 0.9)])
def test_ids_are_those_of_the_twins(
    tiny: str, draft: str | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = generate(build(tiny, draft), temperature=temperature, seed=3)
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    assert ours == generate(build(tiny, None), temperature=temperature, seed=3)


@interpreted
def test_a_step_reads_the_verdict_and_nothing_else(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(tiny, "ngram")
    reads = HostReads()
    reads.install(monkeypatch)
    generate(llm, temperature=0.0)
    assert reads.count == llm.engine.num_steps > 2


def steps() -> list[list[Segment]]:
    """Steps of one bucket: decode, verification, a chunk beside them; other lengths, blocks and rows each time."""
    return [
        [Segment([5, 6, 7], 0, [3], 1), Segment([9, 8], 0, [1], 1)],
        [Segment([4], 3, [3], 1), Segment([8, 8, 7], 2, [1], 3)],
        [Segment([4, 4], 4, [3], 2), Segment([8], 5, [1], 1), Segment([1, 2, 3], 0, [7], 0)],
        [Segment([2] * 8, 0, [0], 8)],
    ]


def check_replays(directory: str, capture: FakeCapture, device: str) -> GraphedForward:
    """Replayed logits against computed ones, step by step."""
    model = load(ModelConfig(model=directory, dtype="float64", device=device))
    runner = ModelRunner(model, 8, 16)
    expected = [runner.forward(runner.pack(segments)).clone() for segments in steps()]
    runner = ModelRunner(model, 8, 16)
    graphs = runner.record_with(capture)
    for segments, logits in zip(steps(), expected):
        assert torch.allclose(runner.forward(runner.pack(segments)), logits, rtol=1e-9, atol=1e-9)
    return graphs


@interpreted
def test_between_replays_no_address_and_no_host_value_changes(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = HostReads()
    reads.install(monkeypatch)
    capture = FakeCapture(reads)
    graphs = check_replays(tiny, capture, "cpu")
    assert capture.num_replays == 4 and graphs.num_graphs == 2, "buckets of 8 and 4 tokens"


@interpreted
def test_a_step_that_reads_a_length_on_the_host_cannot_be_recorded(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the attention twin walks over rows in Python."""
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    reads = HostReads()
    reads.install(monkeypatch)
    with pytest.raises(AssertionError, match="waits for the device inside a recording"):
        check_replays(tiny, FakeCapture(reads), "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_repeat_what_was_computed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_GRAPHS", "off")
    from specdec.models.graphs import CudaCapture

    graphs = check_replays(tiny, CudaCapture(torch.device("cuda")), "cuda")  # type: ignore[arg-type]
    assert graphs.num_graphs == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_waits_for_the_device_once(tiny: str) -> None:
    """CUDA itself counts: each copy or call that synchronises is a warning in this mode."""
    llm = LLM(tiny, "ngram", dtype="bfloat16", num_kv_blocks=64)
    generate(llm, temperature=0.0)  # kernels are compiled and steps recorded
    before = llm.engine.num_steps
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            generate(llm, temperature=0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchroniz" in str(w.message)]) <= llm.engine.num_steps - before
