"""Claims about the adaptive controller, on the real scheduler in computed time."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from statistics import fmean

import pytest

from evals import explain, sim_policies
from evals.sim_run import SOURCE, Simulation
from evals.sim_worlds import WORLDS
from specdec.batch import Drafts, Plan, Row
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.trace import TraceFile
from specdec.controller import FixedLength
from specdec.errors import InvalidRequestError
from specdec.request import Request
from specdec.sampling_params import SamplingParams, SpeculativeParams
from tests.controller.simulated import MOST, arrivals, run_steps, serve, steady


@pytest.mark.parametrize("world", ["cpu", pytest.param("h100", marks=pytest.mark.slow)])
def test_it_is_near_the_oracle_and_never_slower_than_plain(world: str) -> None:
    """Mixed requests at 1, 8 and 32 in flight. The oracle knows every request's true chances and costs."""
    to_oracle = []
    for concurrency in (1, 8, 32):
        jobs = arrivals("mixed", max(10, 3 * concurrency))
        rates = {p: serve(world, p, jobs, concurrency).busy_rate for p in ("plain", "adaptive", "oracle")}
        assert rates["adaptive"] >= 0.97 * rates["plain"]
        to_oracle.append(rates["adaptive"] / rates["oracle"])
    assert fmean(to_oracle) >= 0.95


def test_fixed_lengths_are_slower_than_plain_somewhere() -> None:
    """Negative control: the bound above is one that can be missed."""
    jobs = arrivals("mixed", 64)
    assert serve("cpu", "k=3", jobs, 32).busy_rate < 0.8 * serve("cpu", "plain", jobs, 32).busy_rate


def test_noise_costs_little() -> None:
    """No draft is ever right: what is lost is the probing."""
    jobs = steady(0.0, 16, 150)
    assert serve("cpu-draft", "adaptive", jobs, 8).busy_rate > 0.97 * serve("cpu-draft", "plain", jobs, 8).busy_rate


def test_the_length_follows_the_load_within_ten_steps() -> None:
    """1 -> 32 -> 1 in flight, drafts right with a chance of 0.75: worth it alone, not among 32."""
    simulation = Simulation(WORLDS["cpu"]())
    controller = sim_policies.adaptive(simulation, MOST)
    jobs = deque(steady(0.75, 400, 60))
    alone = run_steps(simulation, controller, jobs, 1, 100)
    crowd = run_steps(simulation, controller, jobs, 32, 100)
    jobs.clear()
    while len(simulation.scheduler.running) > 1:
        simulation.step(controller)
    jobs.extend(steady(0.75, 50, 60))
    again = run_steps(simulation, controller, jobs, 1, 100)
    drafted = [[drafts / rows for rows, drafts in part if rows] for part in (alone, crowd, again)]
    assert fmean(drafted[0][50:]) > 1.5 and fmean(drafted[1][10:]) < 0.35 and fmean(drafted[2][10:]) > 1.5
    assert fmean(drafted[1][4:10]) < 0.5 and fmean(drafted[2][:10]) > 1.0
    assert controller.totals.num_changes <= 8  # on and off, in about 400 steps


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_wrong_costs_are_unlearned_in_200_steps(factor: float) -> None:
    """Tokens beyond the first eight cost three times what the seed says, or a third; nobody comes or goes."""
    rates = {}
    for policy in ("plain", "adaptive", "oracle"):
        simulation = Simulation(WORLDS["cpu"]())
        controller = sim_policies.make(policy, simulation, MOST)
        if policy == "adaptive":
            controller = sim_policies.adaptive(simulation, MOST, distort=lambda n: factor if n > 8 else 1.0)
        jobs = deque(steady(0.7, 12, 960))
        run_steps(simulation, controller, jobs, 12, 200)
        tokens, busy = simulation.result.num_tokens, simulation.result.busy
        run_steps(simulation, controller, jobs, 12, 100)
        rates[policy] = (simulation.result.num_tokens - tokens) / (simulation.result.busy - busy)
    assert rates["adaptive"] > 0.95 * rates["oracle"] and rates["adaptive"] > 0.97 * rates["plain"]


def controller_of(*, looks: bool = True, free: bool = True) -> AdaptiveLength:
    """A controller to which drafts are nearly free."""
    verify = ForwardCost(512, {1: 0.01, 512: 0.011})
    sources = Sources(free=(SOURCE,), looks=looks) if free else Sources(costly=SOURCE, looks=looks)
    draft = None if free else ForwardCost(512, {1: 0.0001, 512: 0.0002})
    controller = AdaptiveLength(FixedLength(4, 50), sources, verify, draft)
    controller.probes.plain_is_due = lambda *_: False  # type: ignore[method-assign]
    return controller


def decoding(name: str, *, known: int = 10, most: int = 99, **speculative: object) -> Request:
    """A request whose prompt is computed."""
    params = SamplingParams(max_tokens=most, speculative=SpeculativeParams(**speculative))  # type: ignore[arg-type]
    request = Request(name, [1] * known, params, max_output_tokens=most)
    request.num_computed_tokens = known - 1
    return request


@pytest.mark.parametrize("free", [True, False])
def test_limits_are_kept(free: bool) -> None:
    """The request's own switch and cap, what it may still emit, and the draft's length of 50."""
    requests = [
        decoding("all"),
        decoding("off", enabled=False),
        decoding("two", num_speculative_tokens=2),
        decoding("ending", most=2),
        decoding("long", known=48),
        decoding("too long", known=60),
    ]
    controller = controller_of(free=free)
    controller.prepare(requests, [])
    assert [controller.budget(r) for r in requests] == [4, 0, 2, 1, 2, 0]


def admitted(controller: AdaptiveLength, token: int) -> int:
    """Drafts admitted where all were this token."""
    request = decoding("r")
    controller.prepare([request], [])
    plan = Plan((Row(request, 9, 1, controller.budget(request)),))
    offer = Drafts.of([(token,) * controller.budget(request)], SOURCE)
    return len(controller.admit(plan, offer).rows[0].draft_token_ids)


def test_without_looking_all_that_was_planned_is_verified() -> None:
    """Rejection sampling forbids a decision that depends on the draw; where it is planned, it is verified."""
    for token in (0, 1):
        controller = controller_of(looks=False)
        assert admitted(controller, token) == 4


def test_decisions_are_traced_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation = Simulation(WORLDS["cpu-draft"]())
    path = tmp_path / "trace.jsonl"
    controller = sim_policies.adaptive(simulation, MOST, trace=TraceFile(str(path)))
    run_steps(simulation, controller, deque(steady(0.8, 30, 40)), 4, 150)
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(steps) == 150 == controller.totals.num_steps
    drafted = [row for step in steps for row in step["rows"] if row["admitted"]]
    assert drafted and all(r["accepted"] <= r["admitted"] <= r["drafted"] <= r["budgeted"] for r in drafted)
    assert sum(r["accepted"] for r in drafted) == pytest.approx(sum(r["gain"] for r in drafted), rel=0.15)
    assert fmean(explain.ratios(steps)) == pytest.approx(1.0, abs=0.05)
    assert explain.main([str(path), "--png", str(tmp_path / "trace.png")]) == 0
    said = capsys.readouterr().out
    assert "calibration error" in said and SOURCE in said and (tmp_path / "trace.png").stat().st_size > 1000
    assert explain.main([str(tmp_path / "trace.png")]) == 2


def test_a_trace_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        TraceFile(str(tmp_path / "no" / "trace.jsonl"))
