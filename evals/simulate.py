"""Simulate: the real scheduler and controller under loads, machines and acceptances of your choice, in computed time.

    python -m evals.simulate --world cpu --process mixed --concurrency 1,4,16,64
    python -m evals.simulate --world h100 --arrivals bursts --load 0.5,0.9 --requests 100000
    python -m evals.simulate --world recorded.jsonl --process recorded.jsonl --concurrency 1,8,32

It draws the requests, runs every policy on the same ones, and prints what came out. Worlds and
synthetic acceptances are assumptions, listed in `sim_worlds`; `python -m evals.record` writes a file of
real ones, which both --world and --process read. --process reads a trace (--speculative-trace) as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from evals import results, sim_policies
from evals.flags import numbers, whole, words
from evals.sim_run import Arrival, SimResult, Simulation
from evals.sim_worlds import ARRIVALS, SYNTHETIC, WORLDS, Process, arrivals, find_world, read_processes, synthetic
from evals.table import milliseconds, render

KIND = "simulate.case"


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: a policy under a load.

    concurrency   of a closed loop; None: requests arrive by themselves at `rate` a second
    """

    world: str
    policy: str
    process: str
    concurrency: int | None
    arrivals: str
    rate: float
    requests: int
    most: int
    max_num_seqs: int
    seed: int

    @property
    def load(self) -> str:
        """As the table names it."""
        return f"c={self.concurrency}" if self.concurrency is not None else f"{self.arrivals} {self.rate:.3g}/s"


def draw(case: Case) -> Iterator[Arrival]:
    """The requests of a case, the same for every policy: prompts of 16 to 128 tokens, outputs of 16 to 144."""
    rng = random.Random(case.seed)
    make = _maker(case.process, rng)
    times = itertools.repeat(0.0) if case.concurrency is not None else arrivals(case.arrivals, case.rate, rng)
    for at in times:
        yield Arrival(at, rng.randint(16, 128), rng.randint(16, 144), make(), rng.getrandbits(48))


def _maker(process: str, rng: random.Random) -> Callable[[], Process]:
    if process in SYNTHETIC or process == "mixed":
        return lambda: synthetic(process, rng)
    recorded = read_processes(Path(process))
    return lambda: rng.choice(recorded)


@dataclass(frozen=True, slots=True)
class Summed:
    """What a policy did in a case; a few numbers, for 10^5 requests leave gigabytes of times.

    busy_rate     tokens per second in which a step ran; end: simulated seconds until all was served
    ttft, itl     seconds at P50 and P99; tpot: mean seconds a token behind the first
    accepted      of the drafts; None without drafts
    zero          share of the steps without drafts
    cpu_seconds   processor time it took to simulate
    """

    busy_rate: float
    end: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    tpot: float
    accepted: float | None
    zero: float
    num_steps: int
    num_tokens: int
    num_drafts: int
    cpu_seconds: float

    @classmethod
    def of(cls, result: SimResult, cpu_seconds: float) -> Summed:
        """Of a whole simulation."""
        return cls(
            busy_rate=result.busy_rate,
            end=result.end,
            ttft=_ends(result.ttft),
            itl=_ends(result.itl),
            tpot=float(np.mean(result.tpot)),
            accepted=result.num_accepted / result.num_drafts if result.num_drafts else None,
            zero=result.num_zero_steps / result.num_steps,
            num_steps=result.num_steps,
            num_tokens=result.num_tokens,
            num_drafts=result.num_drafts,
            cpu_seconds=cpu_seconds,
        )


def _ends(seconds: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(seconds, (50, 99))
    return float(low), float(high)


def run(case: Case) -> Summed:
    """Simulate a case to its end."""
    began = time.process_time()
    simulation = Simulation(find_world(case.world), max_num_seqs=case.max_num_seqs)
    controller = sim_policies.make(case.policy, simulation, case.most)
    if case.concurrency is None:
        result = simulation.run_open(controller, draw(case), case.requests)
    else:
        jobs = list(itertools.islice(draw(case), case.requests))
        result = simulation.run_closed(controller, jobs, case.concurrency)
    return Summed.of(result, time.process_time() - began)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.simulate", __doc__)
    add = parser.add_argument
    add("--world", default="cpu", help=", ".join(sorted(WORLDS)) + ", or a recording of this machine")
    add("--process", default="mixed", help="mixed, " + ", ".join(SYNTHETIC) + ", or a recording or trace of a real run")
    add("--policies", type=words, default=["plain", "k=1", "k=2", "k=3", "k=5", "adaptive", "oracle"])
    add("--concurrency", type=numbers, default=[], help="closed loops with so many requests in flight")
    add("--arrivals", default="poisson", choices=ARRIVALS, help="where no --concurrency is given")
    add("--load", type=words, default=["0.5", "0.9"], help="arrivals, as a share of what plain decoding can serve")
    add("--requests", type=whole(1), default=400)
    add("--k", type=int, default=5, help="most drafts of adaptive and oracle")
    add("--max-num-seqs", type=whole(1), default=64)
    add("--seed", type=int, default=0)
    add("--processes", type=whole(1), default=2)
    add("--resume", type=Path, help="file of an interrupted run; its cases are kept")
    args = parser.parse_args(argv)
    bad = [p for p in args.policies if p not in ("plain", "adaptive", "oracle") and not p.removeprefix("k=").isdigit()]
    if bad:
        parser.error(f"--policies names {', '.join(bad)}; known are plain, k=N, adaptive, oracle")
    if args.requests < 1 or args.k < 1 or min(args.concurrency, default=1) < 1:
        parser.error("--requests, --k and --concurrency must be at least 1")
    if args.world not in WORLDS and not Path(args.world).is_file():
        parser.error(f"--world is {args.world}; known are {', '.join(sorted(WORLDS))}, or a file of evals.record")
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    """Every policy under every load."""
    base = Case(
        args.world, "plain", args.process, None, args.arrivals, 0.0, args.requests, args.k, args.max_num_seqs, args.seed
    )
    if args.concurrency:
        loads = [dataclasses.replace(base, concurrency=c) for c in args.concurrency]
    else:
        full = run(dataclasses.replace(base, concurrency=args.max_num_seqs, requests=4 * args.max_num_seqs))
        capacity = 4 * args.max_num_seqs / full.end
        loads = [dataclasses.replace(base, rate=float(share) * capacity) for share in args.load]
    return [dataclasses.replace(load, policy=policy) for load in loads for policy in args.policies]


def table(found: Sequence[tuple[Case, Summed]]) -> str:
    """One line a case."""
    by_key = {(case.load, case.policy): result for case, result in found}
    rows = []
    for case, result in found:
        plain, oracle = by_key.get((case.load, "plain")), by_key.get((case.load, "oracle"))
        rows.append(
            [
                case.load,
                case.policy,
                f"{result.busy_rate:.1f}",
                "-" if plain is None else f"{result.busy_rate / plain.busy_rate:.3f}",
                "-" if oracle is None else f"{1 - result.busy_rate / oracle.busy_rate:.3f}",
                *(milliseconds(seconds) for seconds in (*result.ttft, *result.itl, result.tpot)),
                "-" if result.accepted is None else f"{result.accepted:.2f}",
                f"{result.zero:.2f}",
            ]
        )
    return render(
        ["load", "policy", "tok/busy s", "to plain", "regret", "ttft ms p50", "p99", "itl ms p50", "p99", "tpot ms",
         "accepted", "steps at zero"], rows,
    )  # fmt: skip


def summary(found: Sequence[tuple[Case, Summed]]) -> dict[str, float]:
    """The mean over the loads of adaptive's rate to the oracle's, and the least to plain's."""
    rates = {(case.load, case.policy): result.busy_rate for case, result in found}
    loads = list(dict.fromkeys(load for load, _ in rates))
    said: dict[str, float] = {}
    for other, name, sum_up in (("oracle", "mean to oracle", statistics.fmean), ("plain", "least to plain", min)):
        ratios = [
            rates[load, "adaptive"] / rates[load, other]
            for load in loads
            if (load, "adaptive") in rates and (load, other) in rates
        ]
        if ratios:
            said[name] = sum_up(ratios)
    return said


def main(argv: Sequence[str]) -> int:
    """Simulate, save, print."""
    args = parse(argv)
    began = time.monotonic()
    try:
        world, todo = find_world(args.world), cases(args)
    except (OSError, ValueError) as error:
        print(f"evals.simulate: {error}", file=sys.stderr)
        return 2
    kept = [read_case(record) for record in results.matching(args.resume, KIND, {})]
    file = results.opened("evals.simulate", argv, args.resume or args.out, args.seed)
    found: list[tuple[Case, Summed]] = []
    is_interrupted = False
    try:
        found += [(case, summed) for case, summed in kept if case in todo]
        left = [case for case in todo if case not in dict(found)]
        for case, summed in tqdm(simulated(left, args.processes), total=len(left), unit="case", disable=None):
            found.append((case, summed))
            file.write(KIND, dataclasses.asdict(case) | dataclasses.asdict(summed))
    except KeyboardInterrupt:
        is_interrupted = True
    found.sort(key=lambda pair: todo.index(pair[0]))
    print(f"world {world.name}; acceptance {args.process}; time is computed, not measured")
    print(table(found))
    for name, value in summary(found).items():
        print(f"adaptive, {name}: {value:.3f}")
    cpu = sum(summed.cpu_seconds for _, summed in found)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {cpu / 60:.1f} of processor time. JSON lines: {file.path}")
    return 130 if is_interrupted else 0


def read_case(record: dict[str, Any]) -> tuple[Case, Summed]:
    """Back from JSON."""
    case = Case(**{field.name: record[field.name] for field in dataclasses.fields(Case)})
    values = {field.name: record[field.name] for field in dataclasses.fields(Summed)}
    return case, Summed(**values | {name: tuple(values[name]) for name in ("ttft", "itl")})


def simulated(todo: Sequence[Case], processes: int) -> Iterator[tuple[Case, Summed]]:
    """The cases with what became of them, in their order."""
    if processes == 1:
        yield from ((case, run(case)) for case in todo)
        return
    pool = ProcessPoolExecutor(processes)
    try:
        yield from zip(todo, pool.map(run, todo), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
