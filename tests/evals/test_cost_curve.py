"""The predicted speed-up is theory's where the costs are known, and what theory leaves out shows beside it."""

from __future__ import annotations

import pytest

from evals.cost_curve import CostCurve
from evals.load import Outcome
from evals.runs import Run, summarise, times_of
from evals.stages import StepShape


def verify(rows: int, tokens: int) -> float:
    """A made-up machine."""
    return 0.010 + 0.001 * rows + 0.0005 * tokens


def run(system: str, steps: list[StepShape], between: float = 0.0) -> Run:
    """A run of 300 tokens in these steps, with time lost between them."""
    seconds = sum(s.draft + s.verify + between for s in steps)
    times = times_of([Outcome(0.0, [1] * 300, [(seconds / 2, 1), (seconds, 299)])])
    return Run(
        workload="chat", concurrency=2, system=system, repeat=0, stats=None, stages={}, num_steps=len(steps),
        steps=steps, forks=[], dtype="float32", **times,
    )  # fmt: skip


def prompt_step(num_prompt: int) -> StepShape:
    return StepShape(0, 0, num_prompt, 0.0, 0.0002 * num_prompt)


def test_it_is_what_theory_says() -> None:
    """150 plain steps of 2 rows against 60 that verify 4 drafts a row and take 3 ms to draft."""
    plain = [prompt_step(50), *[StepShape(2, 2, 0, 0.0, verify(2, 2))] * 150]
    deep = [prompt_step(50), *[StepShape(2, 10, 0, 0.003, verify(2, 10))] * 60]
    _, found = summarise([run("plain", plain), run("ngram k=4", deep)])
    theory = (0.01 + 150 * verify(2, 2)) / (0.01 + 60 * (verify(2, 10) + 0.003))
    assert found.predicted == pytest.approx(theory) == found.ratio.median  # type: ignore[union-attr]
    assert found.over_predicted == pytest.approx(1.0)


def test_time_between_the_steps_is_not_predicted() -> None:
    """Negative control: 10 ms lost behind each step show as a measured ratio below the predicted."""
    plain = [StepShape(2, 2, 0, 0.0, verify(2, 2))] * 150
    deep = [StepShape(2, 10, 0, 0.0, verify(2, 10))] * 60
    _, found = summarise([run("plain", plain), run("ngram k=4", deep, between=0.010)])
    assert found.over_predicted is not None and found.over_predicted == pytest.approx(0.017 / 0.027 * 1.0, rel=0.01)


def test_the_curve_rises_and_prompts_are_told_apart() -> None:
    noisy = [StepShape(1, n, 0, 0.0, 0.01 * f) for n, f in ((1, 1.0), (2, 1.4), (3, 1.0), (4, 2.0))]
    curve = CostCurve([*noisy, StepShape(1, 1, 100, 0.0, 0.03)])
    values = [curve.at(1, n) for n in (1, 2, 3, 4)]
    assert values == sorted(values) and values[1] == values[2] == pytest.approx(0.01 * 1.4**0.5)
    assert curve.per_prompt == pytest.approx(0.0002)
    assert curve.at(7, 2) == curve.at(1, 2)  # the nearest rows that were seen
    assert CostCurve([]).seconds([StepShape(1, 1, 1, 0.0, 1.0)]) == 0.0
