"""Claims about the judgement of the grid, on runs made up; and that the commands run to their end on a toy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evals import grid, results, simulate, speedup
from evals.runs import KIND, Run


def run(system: str, repeat: int, throughput: float, workload: str = "chat") -> Run:
    """A run of 1000 tokens."""
    return Run(
        workload=workload, concurrency=8, system=system, repeat=repeat, seconds=1000 / throughput, ttft=[], itl=[],
        tpot=[], e2e=[], stats=None, stages={}, num_steps=0, steps=[], num_tokens=1000, outputs=[], forks=[],
        dtype="float32",
    )  # fmt: skip


def runs(adaptive: float, lucky: bool = False) -> list[Run]:
    """Eight repetitions; with luck, k=1 shines on the even ones and is dull on the odd ones."""
    made = []
    for r in range(8):
        wobble = 1.0 + 0.01 * (r % 3 - 1)
        made += [run("plain", r, 100 * wobble), run("ngram k=1", r, (140 if lucky and r % 2 == 0 else 90) * wobble)]
        made += [run("ngram k=3", r, 120 * wobble), run("ngram adaptive", r, adaptive)]
    return made


def test_the_best_fixed_policy_is_picked_and_scored_on_different_repetitions() -> None:
    (cell,) = grid.judge(runs(119.0))
    assert cell.picked == "ngram k=3" and cell.holds and cell.to_picked.median == pytest.approx(0.99, abs=0.02)
    (lucky,) = grid.judge(runs(100.0, lucky=True))
    assert lucky.picked == "ngram k=1" and lucky.to_picked.median > 1.05  # its luck is not held against us


def test_a_slow_controller_does_not_hold() -> None:
    """Negative control."""
    (cell,) = grid.judge(runs(110.0))
    assert not cell.holds and "NO" in grid.report(runs(110.0))


def test_over_all_cells_no_fixed_policy_may_win() -> None:
    both = runs(118.0) + [
        replace(r, workload="noise", seconds=10 if r.system in ("plain", "ngram adaptive") else 20) for r in runs(1.0)
    ]
    ratios = grid.overall(both)["ngram adaptive"]
    assert all(ratio.low is not None and ratio.low > 1.0 for ratio in ratios.values())


def test_copying_asks_for_the_text() -> None:
    assert all("word for word" in p.text for p in grid.prompts("copying")) and grid.prompts("adversarial")


def test_the_grid_runs_on_a_toy(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid.jsonl"
    arguments = ["--target", toy, "--dtype", "float64", "--num-prompts", "2", "--max-tokens", "6", "--repeats", "2"]
    arguments += ["--grid", "--workloads", "chat", "--concurrency", "2", "--k", "1", "--out", str(out)]
    assert speedup.main(arguments) == 0
    assert "ngram adaptive over" in capsys.readouterr().out
    assert {r["system"] for r in results.read(out) if r["kind"] == KIND} == {"plain", "ngram k=1", "ngram adaptive"}


def test_simulate_runs_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "simulate.jsonl"
    base = ["--requests", "12", "--policies", "plain,adaptive,oracle", "--processes", "1", "--out", str(out)]
    assert simulate.main([*base, "--world", "h200", "--concurrency", "4"]) == 0
    assert simulate.main([*base, "--arrivals", "bursts", "--load", "0.5", "--max-num-seqs", "4"]) == 0
    said = capsys.readouterr().out
    assert said.count("adaptive, least to plain") == 2 and len(list(results.read(out))) == 6
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:2]) + "\n")  # interrupted behind the second case
    assert simulate.main([*base, "--world", "h200", "--concurrency", "4", "--resume", str(out)]) == 0
    assert len(list(results.read(out))) == 3
    assert simulate.main(["--process", str(out)]) == 2
