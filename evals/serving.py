"""Serving: what a running server bears, seen by its clients, and how many of it a request rate needs.

    python -m evals.serving --url http://127.0.0.1:8000 --slo-ttft 1 --slo-tpot 0.1 --plan 20

Open loop: requests come at their own times whether or not earlier ones are done, and latency counts
from the time a request was due, so a server that stalls cannot hide it. It knows HTTP and clocks.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from tqdm import tqdm

from evals import http_overhead, results, workloads
from evals.arrivals import PATTERNS, arrivals, read_gaps
from evals.flags import above, whole, words
from evals.intervals import percentiles
from evals.load import Job, Outcome
from evals.peers import TIMEOUT, Endpoint, connect, stream
from evals.table import milliseconds, render
from evals.workloads import Prompt

KIND = "serving.rate"
MAX_RATE = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request must keep to count as good; seconds.

    share   of the requests that must keep it for a rate to be borne
    """

    ttft: float
    tpot: float
    share: float

    def is_kept(self, outcome: Outcome) -> bool:
        """True where the request finished, began in time and flowed."""
        if outcome.error is not None or not outcome.emissions:
            return False
        return outcome.ttft <= self.ttft and (outcome.tpot or 0.0) <= self.tpot


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of load.

    rate      requests a second offered; in a closed loop, served
    good      share of the requests that kept the target
    goodput   requests a second that kept it
    """

    rate: float
    concurrency: int | None
    num_requests: int
    num_errors: int
    seconds: float
    tokens_per_second: float
    good: float
    goodput: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    e2e: dict[str, float]


def open_loop(endpoint: Endpoint, jobs: Sequence[Job], moments: Sequence[float]) -> list[Outcome]:
    """Send every job at its moment, in a thread of its own."""
    stopping = threading.Event()
    with (
        httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        began = time.perf_counter()

        def send(job: Job, due: float) -> Outcome:
            if stopping.wait(max(due - time.perf_counter(), 0)):
                return Outcome(due, error="interrupted")
            outcome = stream(client, endpoint, job)
            outcome.submitted = due
            return outcome

        futures = [pool.submit(send, job, began + moment) for job, moment in zip(jobs, moments, strict=True)]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            stopping.set()
            raise


def closed_loop(endpoint: Endpoint, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
    """Keep `concurrency` requests in flight."""
    with (
        httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=concurrency)) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        return list(pool.map(lambda job: stream(client, endpoint, job), jobs))


def level(outcomes: Sequence[Outcome], target: Target, rate: float | None, concurrency: int | None) -> Level:
    """Sum one level up."""
    done = [o for o in outcomes if o.error is None and o.emissions]
    ends = [o.emissions[-1][0] for o in done]
    seconds = max(ends) - min(o.submitted for o in outcomes) if done else math.nan
    num_good = sum(map(target.is_kept, outcomes))
    return Level(
        rate=len(done) / seconds if rate is None and done else rate or 0.0,
        concurrency=concurrency,
        num_requests=len(outcomes),
        num_errors=len(outcomes) - len(done),
        seconds=seconds if done else 0.0,
        tokens_per_second=sum(o.num_tokens for o in done) / seconds if done else 0.0,
        good=num_good / len(outcomes),
        goodput=num_good / seconds if done else 0.0,
        ttft=percentiles([o.ttft for o in done]),
        tpot=percentiles([o.tpot for o in done if o.tpot is not None]),
        itl=percentiles([gap for o in done for gap in o.itls]),
        e2e=percentiles([o.e2e for o in done]),
    )


class Sweep:
    """Doubles the rate until the target breaks, then halves the interval `refinements` times."""

    def __init__(self, start: float, refinements: int) -> None:
        self.rate = start
        self.refinements = refinements
        self.borne: float | None = None
        self.broken: float | None = None

    def tell(self, is_borne: bool) -> None:
        """Note what became of the present rate and choose the next."""
        if is_borne:
            self.borne = self.rate
        else:
            self.broken = self.rate
        if self.broken is None:
            self.rate *= 2
        elif self.borne is None:
            self.rate /= 2
        else:
            self.refinements -= 1
            self.rate = (self.borne + self.broken) / 2

    @property
    def is_over(self) -> bool:
        """True once the knee is narrow enough, or no rate is left to try."""
        found = self.borne is not None and self.broken is not None and self.refinements < 0
        return found or self.rate > MAX_RATE or self.rate < 1 / MAX_RATE


def replicas(rate: float, knee: float, headroom: float) -> int:
    """Servers for a request rate when each may be loaded to (1 - headroom) of its knee.

    >>> replicas(20, 5, 0.4)
    7
    """
    return math.ceil(rate / (knee * (1 - headroom)))


def jobs_for(args: argparse.Namespace, level_index: int) -> list[Job]:
    """Jobs no level shares: a serial number in front keeps caches of prefixes out of it."""
    if args.prompts is not None:
        prompts = workloads.load_file(args.prompts)
    else:
        prompts = [prompt for name in args.workloads for prompt in workloads.load_named(name)]
    made = []
    for i in range(args.num_requests):
        one = prompts[(level_index * args.num_requests + i) % len(prompts)]
        text = f"({args.seed}.{level_index}.{i}) {one.text}"
        made.append(Job(Prompt(text, one.category, one.is_raw), (), args.max_tokens, args.temperature, args.seed + i))
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.serving", __doc__)
    add = parser.add_argument
    add("--url", required=True, help="of a server that speaks OpenAI's protocol")
    add("--api-key", default="none")
    add("--workloads", type=words, default=list(workloads.NAMES))
    add("--prompts", type=Path, help="JSONL, instead of --workloads")
    add("--num-requests", type=whole(1), default=30, help="of each level of load")
    add("--max-tokens", type=whole(1), default=64)
    add("--temperature", type=float, default=0.0)
    add("--rates", type=words, default=[], help="requests a second; default: a sweep that finds the knee")
    add("--start", type=above(0), default=0.5, help="first rate of the sweep")
    add("--refinements", type=int, default=2, help="halvings of the interval that holds the knee")
    add("--concurrency", type=words, default=[], help="closed loops at these levels, instead of rates")
    add("--pattern", choices=PATTERNS, default="poisson")
    add("--trace", type=Path, help="arrival times, one a line, for --pattern trace; stretched to each rate")
    add("--slo-ttft", type=float, default=1.0, help="seconds")
    add("--slo-tpot", type=float, default=0.1, help="seconds a token behind the first")
    add("--slo-share", type=float, default=0.9, help="of the requests that must keep both")
    add("--plan", type=above(0), help="a request rate: how many servers it needs")
    add("--headroom", type=float, default=0.4)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if (args.pattern == "trace") != (args.trace is not None):
        parser.error("--pattern trace and --trace FILE go together")
    try:
        args.gaps = read_gaps(args.trace) if args.trace is not None else ()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def levels(args: argparse.Namespace, endpoint: Endpoint, target: Target, sweep: Sweep) -> Iterator[Level]:
    """Closed loops, fixed rates or the sweep, one after the other."""
    for index, word in enumerate(args.concurrency):
        yield level(closed_loop(endpoint, jobs_for(args, index), int(word)), target, None, int(word))
    for index in range(len(args.rates) if args.rates else 10**6):
        if args.concurrency or (not args.rates and sweep.is_over):
            return
        rate = float(args.rates[index]) if args.rates else sweep.rate
        moments = arrivals(args.pattern, args.num_requests, rate, args.seed + index, args.gaps)
        measured = level(open_loop(endpoint, jobs_for(args, index), moments), target, rate, None)
        if not args.rates:
            sweep.tell(measured.good >= target.share)
        yield measured


def main(argv: Sequence[str]) -> int:
    """Load the server, print, save; 1 where a request failed."""
    if argv[:1] == ["overhead"]:
        return http_overhead.main(argv[1:])
    args = parse(argv)
    try:
        endpoint = connect(args.url, args.api_key)
    except (httpx.HTTPError, KeyError, IndexError) as error:
        print(f"evals.serving: {args.url} does not answer /v1/models: {error}", file=sys.stderr)
        return 2
    target = Target(ttft=args.slo_ttft, tpot=args.slo_tpot, share=args.slo_share)
    file = results.opened("evals.serving", argv, args.out, args.seed)
    sweep = Sweep(args.start, args.refinements)
    measured: list[Level] = []
    is_interrupted = False
    try:
        for one in tqdm(levels(args, endpoint, target, sweep), unit="level", disable=None):
            measured.append(one)
            file.write(KIND, {"model": endpoint.model, "pattern": args.pattern, "slo": asdict(target), **asdict(one)})
    except KeyboardInterrupt:
        is_interrupted = True
    print(table(sorted(measured, key=lambda one: one.rate)))
    print(plan(measured, target, args.plan, args.headroom))
    print(f"JSON lines: {file.path}")
    if any(one.num_errors for one in measured):
        return 1
    return 130 if is_interrupted else 0


def table(measured: Sequence[Level]) -> str:
    """One line a level."""
    rows = [
        [
            f"{one.rate:.3g}",
            "-" if one.concurrency is None else str(one.concurrency),
            str(one.num_requests),
            str(one.num_errors),
            f"{one.tokens_per_second:.1f}",
            *("/".join(milliseconds(v) for v in values.values()) or "-" for values in (one.ttft, one.tpot, one.e2e)),
            f"{100 * one.good:.0f}",
            f"{one.goodput:.3g}",
        ]
        for one in measured
    ]
    times = [f"{name} ms p50/p90/p99" for name in ("ttft", "tpot", "e2e")]
    return render(["req/s", "c", "requests", "errors", "tok/s", *times, "good %", "goodput"], rows)


def plan(measured: Sequence[Level], target: Target, rate: float | None, headroom: float) -> str:
    """The knee in a sentence, and how many servers a rate needs."""
    rule = f"TTFT <= {target.ttft:g} s and TPOT <= {target.tpot:g} s for {100 * target.share:g} % of requests"
    borne = [one.rate for one in measured if one.good >= target.share]
    if not borne:
        return f"no measured load keeps {rule}"
    knee = max(borne)
    is_open = all(one.good >= target.share for one in measured)
    said = f"{'at least ' if is_open else ''}{knee:.3g} requests/s keep {rule}"
    if rate is None:
        return said
    count = replicas(rate, knee, headroom)
    return f"{said}\n{rate:g} requests/s need {count} such servers with {100 * headroom:g} % headroom"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
