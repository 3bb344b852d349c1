"""What was recorded is what is replayed, and the oracle of a replay is not beaten by guessing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from evals import record, results, sim_policies, simulate
from evals.sim_run import Arrival, Simulation
from evals.sim_worlds import COST, PROCESS, WORLDS, Process, read_processes, read_world


def write(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_a_recording_becomes_shares_by_phase_and_place(tmp_path: Path) -> None:
    """Forty steps, offers in the second half only, of which the first draft is right three times in four."""
    drafts = [[0, 0]] * 20 + [[2, 0], [2, 2], [2, 1], [2, 2]] * 5
    (process,) = read_processes(write(tmp_path / "r", [{"kind": PROCESS, "drafts": drafts}]), num_phases=2)
    assert process.offered == (0.0, 1.0) and process.offers(0.9) == 1.0
    assert process.chances(0.9, 3) == pytest.approx(
        [18 / 24, (10 + 4 * 12 / 19) / 19, (10 + 4 * 12 / 19) / 19], abs=0.01
    )


def test_of_a_trace_only_what_was_judged_counts(tmp_path: Path) -> None:
    """Three offers cut by the controller say nothing; two steps without an offer do."""
    steps = [(3, 3, 1)] * 3 + [(3, 0, 0)] * 3 + [(0, 0, 0)] * 2
    rows = [
        {"rows": [{"request_id": "a", "budgeted": 3, "drafted": d, "admitted": a, "accepted": g}]} for d, a, g in steps
    ]
    (process,) = read_processes(write(tmp_path / "t", rows), num_phases=1)
    assert process.offered == (0.6,) and process.phases[0][0] > 0.6 > process.phases[0][1]


def test_a_world_is_the_curve_that_was_measured(tmp_path: Path) -> None:
    cost = {"kind": COST, "by_tokens": [[1, 0.01], [8, 0.02], [16, 0.04]], "per_prompt": 1e-4, "machine": {"cpu": "x"}}
    world = read_world(write(tmp_path / "w", [cost]))
    assert world.verify(8, 0, 0) == 0.02 and world.verify(24, 99, 0) == pytest.approx(0.06)
    assert world.verify(58, 0, 50) == pytest.approx(0.025) and world.verify(50, 0, 50) == pytest.approx(0.005)
    with pytest.raises(ValueError, match="no cost curve"):
        read_world(write(tmp_path / "none", [{"kind": PROCESS}]))


def test_where_offers_are_rare_the_oracle_still_knows_more() -> None:
    """One step in four has an offer, right or wrong by the request; adaptive is a little behind, plain far."""
    rng = random.Random(0)
    jobs = [
        Arrival(0.0, 32, rng.randint(40, 120), Process(((rng.choice([0.1, 0.9]),),), (0.25,)), seed)
        for seed in range(24)
    ]
    rates = {}
    for policy in ("plain", "adaptive", "oracle"):
        simulation = Simulation(WORLDS["cpu"](), max_num_seqs=4)
        result = simulation.run_closed(sim_policies.make(policy, simulation, 5), jobs, 4)
        rates[policy] = result.busy_rate
    assert rates["oracle"] > rates["adaptive"] > 0.95 * rates["oracle"] > rates["plain"]


def test_a_toy_is_recorded_and_replayed(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recorded.jsonl"
    arguments = ["--target", toy, "--dtype", "float64", "--workloads", "code", "--num-prompts", "2"]
    arguments += ["--max-tokens", "24", "--concurrency", "1,2", "--k", "0,2", "--out", str(out)]
    assert record.main(arguments) == 0
    kinds = [r["kind"] for r in results.read(out)]
    assert kinds == [PROCESS, PROCESS, COST]
    assert record.main(arguments) == 2  # one file holds one recording
    replay = ["--process", str(out), "--world", str(out), "--requests", "6", "--processes", "1", "--concurrency", "2"]
    assert simulate.main([*replay, "--policies", "plain,oracle", "--out", str(tmp_path / "simulated.jsonl")]) == 0
    assert "world measured on" in capsys.readouterr().out
