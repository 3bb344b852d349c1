"""Admission rules by hand, and the ladder from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import batching, results
from evals.admission import AdaptiveDynamic, Arrived, Continuous, Dynamic, Static, padding_waste
from evals.load import Job, Outcome
from evals.workloads import Prompt


def queue(*lengths: int, moments: tuple[float, ...] | None = None) -> list[Arrived]:
    jobs = [Job(Prompt("p", "chat"), (0,) * length, 0, 0.0, 0) for length in lengths]
    return [Arrived(i, job, (moments or (0.0,) * len(jobs))[i]) for i, job in enumerate(jobs)]


def admitted(found: list[Arrived]) -> list[int]:
    return [arrived.index for arrived in found]


def test_static_waits_for_a_full_batch_and_an_empty_engine() -> None:
    rule = Static(2, 2, "static")
    assert rule.admit(queue(5), 0, 99.0, False) == []
    assert admitted(rule.admit(queue(5), 0, 0.0, True)) == [0]
    assert admitted(rule.admit(queue(5, 6, 7), 0, 0.0, False)) == [0, 1]
    assert rule.admit(queue(5, 6), 1, 0.0, False) == []


def test_buckets_join_like_lengths_and_never_leave_the_oldest() -> None:
    assert admitted(Static(2, 4, "buckets").admit(queue(5, 90, 80, 6), 0, 0.0, False)) == [0, 3]
    assert admitted(Static(2, 4, "buckets").admit(queue(90, 5, 6, 80), 0, 0.0, False)) == [0, 3]


def test_dynamic_goes_when_full_or_late() -> None:
    rule = Dynamic(2, 1.0)
    assert rule.admit(queue(5), 0, 0.9, False) == []
    assert admitted(rule.admit(queue(5), 0, 1.0, False)) == [0]
    assert admitted(rule.admit(queue(5, 5, 5), 0, 0.0, False)) == [0, 1]


def test_adaptive_does_not_wait_for_nobody() -> None:
    """Arrivals two seconds apart: a timeout of one would be waited for in vain."""
    rule = AdaptiveDynamic(2, 1.0)
    assert rule.admit(queue(5, 5, moments=(0.0, 2.0))[:1], 0, 0.5, False) == []  # nothing is known yet
    late = queue(5, 5, moments=(0.0, 2.0))[1:]
    assert admitted(rule.admit(late, 0, 2.0, False)) == [1]


def test_continuous_lets_all_in() -> None:
    assert admitted(Continuous().admit(queue(1, 2, 3), 7, 0.0, False)) == [0, 1, 2]


def test_padding_is_nothing_for_equal_lengths() -> None:
    assert padding_waste([[4, 4], [7]]) == 0
    assert padding_waste([[4, 2]]) == pytest.approx(0.25)


@pytest.mark.slow
def test_the_ladder(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "batching.jsonl"
    arguments = ["--target", toy, "--workloads", "math", "--out", str(out), "--dtype", "float64", "--num-jobs", "5"]
    arguments += ["--max-tokens", "8", "--size", "2", "--timeout", "0.01", "--repeats", "1"]
    assert batching.main(arguments) == 0
    records = {record["rung"]: record for record in results.read(out)}
    assert len(records) == 7 and all(record["is_equal"] for record in records.values())
    assert set(records["one at a time"]["steps_by_rows"]) == {"1"}
    assert "DIFFERS" not in capsys.readouterr().out


def served(seconds: float) -> batching.Served:
    """One job of ten tokens that took so long."""
    return batching.Served([Outcome(0.0, emissions=[(seconds / 2, 5), (seconds, 5)])])


def climbs(*seconds: float) -> list[batching.Climb]:
    return [batching.Climb(served(one), served(one), True) for one in seconds]


def test_what_theory_says_is_shown_or_explained() -> None:
    climbed = {
        "one at a time": climbs(4.0, 4.1, 4.0),
        "static": climbs(2.0, 2.1, 2.0),
        "continuous": climbs(1.9, 2.3, 2.0),
        "continuous, k=4": climbs(3.0, 3.4, 3.1),
    }
    said = batching.theory(climbed, 4).splitlines()[1:]
    assert [line[2:11].strip() for line in said] == ["shown", "not shown", "FAILS"]
    assert "waits for weights" not in said[0] and "a refused draft costs" in said[2]
