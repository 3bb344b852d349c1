"""Small simulations for the controller's tests: a few dozen short requests in computed time."""

from __future__ import annotations

import random
from collections import deque

from evals import sim_policies
from evals.sim_run import Arrival, SimResult, Simulation
from evals.sim_worlds import WORLDS, Process, synthetic
from specdec.controller import Controller

MOST = 5


def arrivals(kind: str, count: int, num_output: int = 80, seed: int = 0) -> list[Arrival]:
    """Requests of a kind; the same ones for every policy."""
    rng = random.Random(seed)
    return [
        Arrival(0.0, rng.randint(16, 64), num_output, synthetic(kind, rng), rng.getrandbits(40)) for _ in range(count)
    ]


def steady(chance: float, count: int, num_output: int) -> list[Arrival]:
    """Requests whose drafts are all right with one chance."""
    process = Process(((chance,),))
    return [Arrival(0.0, 16, num_output, process, seed) for seed in range(count)]


def serve(world: str, policy: str, jobs: list[Arrival], concurrency: int) -> SimResult:
    """A closed loop to its end."""
    simulation = Simulation(WORLDS[world](), max_num_seqs=64)
    return simulation.run_closed(sim_policies.make(policy, simulation, MOST), jobs, concurrency)


def run_steps(
    simulation: Simulation, controller: Controller, jobs: deque[Arrival], concurrency: int, steps: int
) -> list[tuple[int, int]]:
    """So many steps of a closed loop; (rows, drafts) of each."""
    found = []
    for _ in range(steps):
        simulation.refill(jobs, concurrency)
        before = simulation.result.num_drafts
        simulation.step(controller)
        found.append((len(simulation.scheduler.running), simulation.result.num_drafts - before))
    return found
