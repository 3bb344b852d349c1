"""The comparison says equal of equal engines, and catches one that lies, one that dawdles, one that repeats."""

from __future__ import annotations

import pytest

from evals.load import Outcome
from evals.runs import Run, summarise
from evals.stages import WatchedEngine
from specdec import LLM
from tests.evals.doubles import DropsToken, Sleeps, compare, jobs_for, system


@pytest.fixture(scope="module")
def llm(toy: str) -> LLM:
    return LLM(toy, None, dtype="float64", num_kv_blocks=64, enable_prefix_caching=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_engine_twice_is_equal(llm: LLM, temperature: float) -> None:
    plain = system(WatchedEngine(llm.engine), "plain")
    runs = compare(llm, [plain, system(WatchedEngine(llm.engine), "twin")], jobs_for(llm, 3, temperature=temperature))
    assert all(run.is_equal and not run.forks for run in runs)
    assert all(run.num_tokens == 24 for run in runs)
    assert {stage for run in runs for stage, seconds in run.stages.items() if seconds > 0} >= {"forward", "commit"}


def test_a_dropped_token_is_caught(llm: LLM) -> None:
    """Negative control: the text differs, so the row is marked."""
    plain = system(WatchedEngine(llm.engine), "plain")
    runs = compare(llm, [plain, system(DropsToken(llm.engine), "liar")], jobs_for(llm, 3), repeats=1)
    summaries = {summary.system: summary for summary in summarise(runs)}
    assert summaries["plain"].is_equal
    assert not summaries["liar"].is_equal
    assert summaries["liar"].num_forks == 3


def test_sleeping_is_caught(llm: LLM) -> None:
    """Negative control: a step that takes five times as long shows in the ratio, its interval below 1.

    Its forwards are as fast as plain's, so the cost curve predicts no loss, and the shortfall shows beside it.
    """
    plain = system(WatchedEngine(llm.engine), "plain")
    runs = compare(llm, [plain, system(Sleeps(llm.engine), "slow")], jobs_for(llm, 2, max_tokens=16), repeats=4)
    slow = next(summary for summary in summarise(runs) if summary.system == "slow")
    assert slow.is_equal
    assert slow.ratio is not None and slow.ratio.high is not None
    assert slow.ratio.high < 1
    assert slow.predicted is not None and 0.8 < slow.predicted < 1.25
    assert slow.over_predicted is not None and slow.over_predicted < 0.8


def test_plain_comes_first(llm: LLM) -> None:
    with pytest.raises(ValueError, match="plain"):
        compare(llm, [system(WatchedEngine(llm.engine), "other")], jobs_for(llm, 1))


def test_a_run_survives_its_record(llm: LLM) -> None:
    (run,) = compare(llm, [system(WatchedEngine(llm.engine), "plain")], jobs_for(llm, 2), repeats=1)
    assert Run.from_record(run.to_record() | {"kind": "speedup.run"}) == run


def test_latencies_are_what_a_client_sees() -> None:
    outcome = Outcome(10.0, [1, 2, 3, 4], [(11.0, 1), (13.0, 3)])
    assert (outcome.ttft, outcome.e2e, outcome.itls) == (1.0, 3.0, [2.0])
    assert outcome.tpot == pytest.approx(2 / 3)
