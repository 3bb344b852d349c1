"""The engine on interpreted kernels: the twins' ids, steps that can be recorded, one read a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import build, check_replays, generate, rejecting
from recording import FakeCapture, HostReads

from tests.toys import make_toy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer, so that the interpreter has little to do."""
    return make_toy(tmp_path_factory.mktemp("toys") / "tiny", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("draft", "temperature"),
    [
        ("ngram", 0.9),
        pytest.param(None, 0.9, marks=pytest.mark.slow),
        pytest.param("ngram", 0.0, marks=pytest.mark.slow),
    ],
)
def test_ids_are_those_of_the_twins(
    tiny: str, draft: str | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = generate(build(tiny, draft), temperature=temperature, seed=3)
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    assert ours == generate(build(tiny, None), temperature=temperature, seed=3)


def test_rejection_draws_what_the_twin_draws(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins, residuals and the draft's own draws; drafts are kept and refused."""
    draft = make_toy(tmp_path / "draft", seed=1, num_hidden_layers=1)
    ours, kept, refused = rejecting(tiny, draft, 5)
    assert kept and refused
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    assert rejecting(tiny, draft, 5)[0] == ours


def test_an_fp8_cache_gives_the_ids_of_the_twins(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, read and scaled by the kernels, with drafts; by the twins, without."""
    monkeypatch.setattr("specdec.models.kv_scales.NUM_TOKENS", 16)
    ours = generate(build(tiny, "ngram", kv_cache_dtype="fp8"), 4, temperature=0.9, seed=3)
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    assert ours == generate(build(tiny, None, kv_cache_dtype="fp8"), 4, temperature=0.9, seed=3)


def test_a_step_reads_the_verdict_and_nothing_else(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(tiny, "ngram")
    reads = HostReads()
    reads.install(monkeypatch)
    generate(llm, max_tokens=3, temperature=0.0)
    assert reads.count == llm.engine.num_steps >= 2


def test_between_replays_no_address_and_no_host_value_changes(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = HostReads()
    reads.install(monkeypatch)
    capture = FakeCapture(reads)
    graphs = check_replays(tiny, capture, "cpu")
    assert capture.num_replays == 4 and graphs.num_graphs == 2, "buckets of 8 and 4 tokens"


def test_a_step_that_reads_a_length_on_the_host_cannot_be_recorded(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the attention twin walks over rows in Python."""
    monkeypatch.setenv("SPECDEC_KERNELS", "reference")
    reads = HostReads()
    reads.install(monkeypatch)
    with pytest.raises(AssertionError, match="waits for the device inside a recording"):
        check_replays(tiny, FakeCapture(reads), "cpu")
