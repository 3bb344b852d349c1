"""The engine on a GPU: graphs repeat what was computed, and a step waits for the device once."""

from __future__ import annotations

import pytest
import torch
from engine_cases import build, check_replays, generate

from specdec.models.graphs import CudaCapture
from tests.toys import make_toy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As on a CPU."""
    return make_toy(tmp_path_factory.mktemp("toys") / "tiny", num_hidden_layers=1)


@needs_gpu
@pytest.mark.parametrize(("draft", "temperature"), [(None, 0.9), ("ngram", 0.0), ("ngram", 0.9)])
def test_ids_are_those_of_the_twins(
    tiny: str, draft: str | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = generate(build(tiny, draft), temperature=temperature, seed=3)
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    monkeypatch.setenv("SPECDEC_GRAPHS", "off")
    assert ours == generate(build(tiny, None), temperature=temperature, seed=3)


@needs_gpu
def test_cuda_graphs_repeat_what_was_computed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_GRAPHS", "off")
    graphs = check_replays(tiny, CudaCapture(torch.device("cuda")), "cuda")
    assert graphs.num_graphs == 2


@needs_gpu
def test_a_step_waits_for_the_device_once(tiny: str) -> None:
    """CUDA itself counts: each copy or call that synchronises is a warning in this mode."""
    llm = build(tiny, "ngram")
    generate(llm, temperature=0.0)  # kernels are compiled and steps recorded
    before = llm.engine.num_steps
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            generate(llm, temperature=0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchroniz" in str(w.message)]) <= llm.engine.num_steps - before
