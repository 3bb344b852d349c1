"""Batching: the serving ladder on one workload, from one at a time to continuous with speculation.

    python -m evals.batching --num-jobs 24 --load 0.7

All rungs drive the same engine and differ only in when jobs may enter. Each serves the jobs twice:
all at once, for throughput, and as Poisson arrivals at a share of the continuous rung's capacity,
for latency. Rows that finish leave the engine at once, so static batches are flattered here: an
engine that pads would also pay for what the column "padding" says.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from evals import ladder, results, workloads
from evals.admission import AdaptiveDynamic, Arrived, Continuous, Dynamic, Rule, Static, padding_waste
from evals.equality import first_difference
from evals.flags import above, whole, words
from evals.intervals import interval, percentiles
from evals.load import Job, Outcome, record, sampling_params
from evals.systems import Setup, encode, load
from evals.table import milliseconds, render
from specdec import LLM, SpeculativeParams
from specdec.engine import Engine
from specdec.request import Request

KIND = "batching.run"


@dataclass(slots=True)
class Served:
    """What one rung did with the jobs.

    rows      steps by their number of rows
    batches   lengths of the jobs that entered together
    """

    outcomes: list[Outcome]
    rows: Counter[int] = field(default_factory=Counter)
    batches: list[list[int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(o.emissions[-1][0] for o in self.outcomes) - min(o.submitted for o in self.outcomes)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return sum(o.num_tokens for o in self.outcomes) / self.seconds


def serve(engine: Engine, jobs: Sequence[Job], arrivals: Sequence[float], rule: Rule, k: int) -> Served:
    """Let jobs arrive at their times and enter by the rule; latency counts from arrival."""
    began = time.perf_counter()
    coming = [Arrived(i, job, began + moment) for i, (job, moment) in enumerate(zip(jobs, arrivals, strict=True))]
    served = Served([Outcome(arrived.moment) for arrived in coming])
    waiting: list[Arrived] = []
    running: dict[str, int] = {}
    params = SpeculativeParams(enabled=k > 0, num_speculative_tokens=k)
    try:
        while coming or waiting or running:
            now = time.perf_counter()
            while coming and coming[0].moment <= now:
                waiting.append(coming.pop(0))
            entering = rule.admit(waiting, len(running), now, not coming)
            for arrived in entering:
                waiting.remove(arrived)
                running |= {_submit(engine, arrived, params).request_id: arrived.index}
            if entering:
                served.batches.append([arrived.length for arrived in entering])
            if running:
                _step(engine, served, running)
            else:
                wake = min(coming[0].moment if coming else math.inf, rule.deadline(waiting))
                time.sleep(max(min(wake - time.perf_counter(), 0.1), 0))
    finally:
        for request_id in running:
            engine.abort(request_id)
    return served


def _submit(engine: Engine, arrived: Arrived, params: SpeculativeParams) -> Request:
    prompt = arrived.job.token_ids
    request = engine.make_request(f"eval-{arrived.index}", prompt, sampling_params(arrived.job, params))
    engine.add(request)
    return request


def _step(engine: Engine, served: Served, running: dict[str, int]) -> None:
    gains = engine.step()
    now = time.perf_counter()
    served.rows[len(gains)] += 1
    for gain in gains:
        record(served.outcomes[running[gain.request.request_id]], gain.request, gain.token_ids, now)
        if gain.request.is_finished:
            del running[gain.request.request_id]


def rungs(size: int, timeout: float, k: int) -> list[tuple[str, Callable[[], Rule], int]]:
    """Name, a fresh rule and the draft length of every rung, lowest first."""
    return [
        ("one at a time", lambda: Static(1, 1, "one at a time"), 0),
        ("static", lambda: Static(size, size, "static"), 0),
        ("static, by length", lambda: Static(size, 4 * size, "static, by length"), 0),
        ("dynamic, fixed", lambda: Dynamic(size, timeout), 0),
        ("dynamic, adaptive", lambda: AdaptiveDynamic(size, timeout), 0),
        ("continuous", Continuous, 0),
        (f"continuous, k={k}", Continuous, k),
    ]


def make_jobs(llm: LLM, args: argparse.Namespace) -> list[Job]:
    """Prompts of all the workloads, shuffled; output lengths from 1/8 of max-tokens to all of it."""
    noise = random.Random(args.seed)
    prompts = [prompt for name in args.workloads for prompt in workloads.load_named(name)]
    noise.shuffle(prompts)
    most = args.max_tokens
    return [
        Job(prompt, encode(llm, prompt), noise.randint(max(most // 8, 1), most), 0.0, args.seed + i)
        for i, prompt in enumerate(workloads.take(prompts, args.num_jobs))
    ]


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process; an infinite rate brings all at once."""
    noise = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(count):
        now += noise.expovariate(rate) if math.isfinite(rate) else 0.0
        moments.append(now)
    return moments


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.batching", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--draft", help="a second model; default: n-gram look-up")
    add("--workloads", type=words, default=["chat", "extract", "summarise"])
    add("--num-jobs", type=whole(1), default=24)
    add("--max-tokens", type=whole(1), default=48)
    add("--size", type=whole(1), default=8, help="of static and dynamic batches, and most rows of the engine")
    add("--timeout", type=above(0), default=0.5, help="seconds a dynamic batch waits for company")
    add("--k", type=int, default=4)
    add("--load", type=above(0), default=0.7, help="arrivals, as a share of the continuous rung's capacity")
    add("--repeats", type=whole(1), default=3)
    add("--dtype", default="auto")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Climb the ladder; 1 where a rung changed a text."""
    args = parse(argv)
    setup = Setup(
        target=args.target,
        draft=args.draft,
        dtype=args.dtype,
        ks=(args.k,),
        max_concurrency=args.size,
        max_tokens=args.max_tokens,
    )
    llm = load(setup, "draft" if args.draft else "ngram", 1024)
    jobs = make_jobs(llm, args)
    file = results.opened("evals.batching", argv, args.out, args.seed)
    climbed: dict[str, list[Climb]] = {}
    is_interrupted = False
    try:
        climb(llm.engine, jobs, args, file, climbed)
    except KeyboardInterrupt:
        is_interrupted = True
    print(render(_HEADERS, [_line(label, climbs, climbed) for label, climbs in climbed.items()]))
    print(f"\n{theory(climbed, args.k)}\n\n{_NOTES.format(**vars(args))}\nJSON lines: {file.path}")
    if not all(one.is_equal for climbs in climbed.values() for one in climbs):
        return 1
    return 130 if is_interrupted else 0


@dataclass(frozen=True, slots=True)
class Climb:
    """One rung, once: all jobs at once, and spread over time."""

    at_once: Served
    spread: Served
    is_equal: bool

    @property
    def summed(self) -> ladder.Climbed:
        """Its three numbers."""
        outcomes = self.spread.outcomes
        latency = statistics.fmean(o.e2e for o in outcomes)
        return ladder.Climbed(self.at_once.throughput, latency, statistics.fmean(o.ttft for o in outcomes))


def theory(climbed: dict[str, list[Climb]], k: int) -> str:
    """What theory says of these climbs."""
    return ladder.theory({label: [one.summed for one in own] for label, own in climbed.items()}, k)


_HEADERS = [
    "rung",
    "tok/s",
    "of one at a time",
    "p50 ms",
    "p99 ms",
    "ttft p50",
    "ttft p99",
    "rows/step",
    "quartiles",
    "padding",
    "text",
]
_NOTES = (
    "tok/s: all {num_jobs} jobs at once, median [95 % interval] of {repeats} repeats. Latencies: Poisson arrivals at "
    "{load} of the continuous rung's capacity, from arrival to last and first token. rows/step, its quartiles and "
    "padding: of the Poisson runs; padding is what an engine that pads would add."
)


def climb(
    engine: Engine,
    jobs: Sequence[Job],
    args: argparse.Namespace,
    file: results.ResultFile,
    climbed: dict[str, list[Climb]],
) -> None:
    """Measure every rung in turn, again and again; what is finished is saved whatever follows."""
    serve(engine, [replace(job, max_tokens=4) for job in jobs[: args.size]], [0.0] * args.size, Continuous(), 0)
    steps = rungs(args.size, args.timeout, args.k)
    burst = [0.0] * len(jobs)
    first = serve(engine, jobs, burst, Continuous(), 0)
    reference = [o.token_ids for o in first.outcomes]
    rate = args.load * len(jobs) / first.seconds
    with tqdm(total=args.repeats * len(steps), unit="run", disable=None) as bar:
        for repeat in range(args.repeats):
            arrivals = poisson(len(jobs), rate, args.seed + repeat)
            for label, make, k in steps:
                at_once = serve(engine, jobs, burst, make(), k)
                spread = serve(engine, jobs, arrivals, make(), k)
                one = Climb(at_once, spread, _is_same(reference, at_once) and _is_same(reference, spread))
                climbed.setdefault(label, []).append(one)
                file.write(KIND, _record(label, k, repeat, one) | {"arrivals_per_second": rate})
                bar.update()


def _is_same(reference: Sequence[Sequence[int]], served: Served) -> bool:
    return all(first_difference(ids, o.token_ids) is None for ids, o in zip(reference, served.outcomes, strict=True))


def _record(label: str, k: int, repeat: int, one: Climb) -> dict[str, Any]:
    return {
        "rung": label,
        "k": k,
        "repeat": repeat,
        "tokens_per_second": one.at_once.throughput,
        "e2e": [o.e2e for o in one.spread.outcomes],
        "ttft": [o.ttft for o in one.spread.outcomes],
        "steps_by_rows": {str(rows): count for rows, count in sorted(one.spread.rows.items())},
        "padding_waste": padding_waste(one.spread.batches),
        "is_equal": one.is_equal,
    }


def _line(label: str, climbs: Sequence[Climb], climbed: dict[str, list[Climb]]) -> list[str]:
    lowest = next(iter(climbed.values()))
    ratios = [one.at_once.throughput / low.at_once.throughput for one, low in zip(climbs, lowest)]
    outcomes = [o for one in climbs for o in one.spread.outcomes]
    e2e, ttft = percentiles([o.e2e for o in outcomes]), percentiles([o.ttft for o in outcomes])
    rows = sum((one.spread.rows for one in climbs), Counter[int]())
    return [
        label,
        str(interval([one.at_once.throughput for one in climbs])),
        str(interval(ratios)) if climbs is not lowest else "1",
        *(milliseconds(values[p]) for values in (e2e, ttft) for p in ("p50", "p99")),
        f"{sum(size * count for size, count in rows.items()) / rows.total():.2f}",
        " ".join(str(size) for size in _quartiles(rows)),
        f"{padding_waste([batch for one in climbs for batch in one.spread.batches]):.2f}",
        "equal" if all(one.is_equal for one in climbs) else "DIFFERS",
    ]


def _quartiles(rows: Counter[int]) -> list[int]:
    """Rows of a step at the 25, 50 and 75 % points."""
    steps = sorted(rows.elements())
    return [steps[len(steps) * part // 4] for part in (1, 2, 3)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
