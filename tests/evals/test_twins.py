"""Two equal configurations are found equal, two that are not are found out, and off is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import results, twins
from evals.intervals import interval


def arguments(toy: str, out: Path, seeds: int) -> list[str]:
    return ["--target", toy, "--dtype", "float64", "--seeds", str(seeds), "--max-tokens", "8", "--out", str(out)]


@pytest.mark.parametrize("other", [pytest.param("twin", marks=pytest.mark.slow), "off"])
def test_every_seed_is_compared_and_nothing_is_drafted(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    out = tmp_path / "twins.jsonl"
    few = ["--other", other, "--num-prompts", "2", "--concurrency", "2", "--repeats", "2"]
    assert twins.main([*arguments(toy, out, 2), *few]) in (0, 1)
    said, found = capsys.readouterr().out, list(results.read(out))
    assert "of 2 intervals hold 1" in said and "0 runs differed in text or drafted" in said
    assert [r["seed"] for r in found] == [0, 1] and all(len(r["ratios"]) == 2 for r in found)
    assert twins.main([*arguments(toy, out, 2), *few, "--resume", str(out)]) in (0, 1)
    assert (
        len(list(results.read(out))) == 2 and "of 2 intervals hold 1" in capsys.readouterr().out
    )  # none measured anew


@pytest.mark.slow
def test_equals_are_found_equal_in_nearly_all_seeds(toy: str, tmp_path: Path) -> None:
    """At least 16 of 20: true 95 % intervals fall short of that once in 390 times, so a failure is no bad luck."""
    out = tmp_path / "twins.jsonl"
    twins.main(arguments(toy, out, 20))
    covered = sum(twins.holds_one(interval(record["ratios"])) for record in results.read(out))
    assert covered >= 16 and twins.chance_of_fewer(16, 20) < 1 / 380


def test_a_mark_is_missed_by_true_intervals_as_often_as_it_says() -> None:
    assert twins.chance_of_fewer(19, 20) == pytest.approx(0.264, abs=0.001)
    assert twins.holds_one(interval([0.9, 1.2])) and not twins.holds_one(interval([0.5, 0.51, 0.5]))
    assert not twins.holds_one(interval([1.0]))  # one run says nothing
