"""Twins: two configurations that should be equally fast, compared as a speed-up is, seed after seed.

    python -m evals.twins                 # plain decoding against itself, loaded twice
    python -m evals.twins --other off     # against an engine that could draft and never does

An interval that claims 95 % should hold a ratio of 1 in 19 of 20 seeds. Where it does not, no speed-up
this room prints can be believed. It knows no workload's worth; its prompts are few and short.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from evals import results, workloads
from evals.compare import Comparison
from evals.equality import Judge
from evals.flags import whole
from evals.intervals import Interval, interval
from evals.load import Job
from evals.runs import PLAIN, Run
from evals.stages import WatchedEngine
from evals.systems import EngineSystem, Setup, encode, load
from evals.table import render
from specdec import LLM
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import FixedLength
from specdec.models.sources import resolve

KIND = "twins.seed"
SHARE = 0.95
K = 4
PROMPT_TOKENS = 96
UNAFFORDABLE = {1: 1e3, 512: 1e3}
"""Seconds of a draft pass by tokens: no step pays for one, and no probe."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.twins", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--other", choices=("twin", "off"), default="twin", help="twin: the same again; off: a draft that is not used")
    add("--draft", help="of --other off: a second model or a head; default: the target itself")
    add("--seeds", type=whole(1), default=20)
    add("--repeats", type=whole(1), default=3, help="pairs of runs of each seed")
    add("--num-prompts", type=whole(1), default=4)
    add("--max-tokens", type=whole(1), default=16)
    add("--concurrency", type=whole(1), default=4)
    add("--dtype", default="auto")
    add("--resume", type=Path, help="file of an interrupted run; its seeds with these settings are kept")
    args = parser.parse_args(argv)
    args.out = args.resume or args.out
    if args.repeats < 2 or args.seeds < 1:
        parser.error("an interval needs --repeats 2 or more, and --seeds 1 or more")
    return args


def build(args: argparse.Namespace) -> tuple[LLM, list[EngineSystem]]:
    """Plain decoding and its counterpart: two engines, pools of the same size."""
    setup = Setup(
        target=args.target,
        draft=args.draft or str(resolve(args.target)),
        dtype=args.dtype,
        ks=(K,),
        max_concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        adaptive=True,
    )
    llm = load(setup, PLAIN, 1024)
    plain = EngineSystem(WatchedEngine(llm.engine), PLAIN, 0)
    if args.other == "twin":
        return llm, [plain, EngineSystem(WatchedEngine(load(setup, PLAIN, 1024).engine), "twin", 0)]
    engine = load(setup, "draft", 1024).engine
    assert isinstance(engine.controller, AdaptiveLength)
    return llm, [plain, EngineSystem(WatchedEngine(engine), "off", None, never(engine.controller))]


def never(controller: AdaptiveLength) -> AdaptiveLength:
    """The same controller, to which drafting is unaffordable."""
    sources = controller.sources
    limits = FixedLength(K, controller.limits.max_draft_position)
    costly = Sources(costly=sources.costly, lag=sources.lag)
    return AdaptiveLength(limits, costly, ForwardCost(512), ForwardCost(512, UNAFFORDABLE))


def jobs_of(args: argparse.Namespace, llm: LLM, seed: int) -> list[Job]:
    """Prompts of all workloads in turn, others for the next seed; sampled, so that texts differ as well."""
    prompts = [prompt for name in workloads.NAMES for prompt in workloads.load_named(name)]
    chosen = [prompts[(seed * args.num_prompts + i) % len(prompts)] for i in range(args.num_prompts)]
    return [Job(p, encode(llm, p)[:PROMPT_TOKENS], args.max_tokens, 1.0, 1000 * seed + i) for i, p in enumerate(chosen)]


def compare(systems: Sequence[EngineSystem], judge: Judge, llm: LLM, jobs: Sequence[Job], repeats: range) -> list[Run]:
    """One seed's runs."""
    assert llm.tokenizer is not None
    comparison = Comparison(systems, judge, llm.tokenizer.decode, save=lambda run: None)
    with tqdm(disable=True) as bar:
        comparison.measure("twins", jobs, len(jobs), repeats, bar)
    return comparison.runs


def ratios_of(runs: Sequence[Run]) -> list[float]:
    """The other's throughput over plain's, of each repetition."""
    by_repeat: dict[int, dict[bool, float]] = {}
    for run in runs:
        by_repeat.setdefault(run.repeat, {})[run.system == PLAIN] = run.throughput
    return [pair[False] / pair[True] for pair in by_repeat.values()]


def holds_one(found: Interval) -> bool:
    """True where the interval contains 1."""
    return found.low is not None and found.high is not None and found.low <= 1.0 <= found.high


def chance_of_fewer(count: int, tries: int, share: float = SHARE) -> float:
    """How often true intervals of this share would hold 1 in fewer than `count` of so many tries.

    >>> round(chance_of_fewer(19, 20), 2)
    0.26
    """
    return sum(math.comb(tries, k) * share**k * (1 - share) ** (tries - k) for k in range(count))


def main(argv: Sequence[str]) -> int:
    """Measure, print, save; 1 where too few intervals hold 1, or a text differs, or a draft was made while off."""
    args = parse(argv)
    llm, systems = build(args)
    file = results.opened("evals.twins", argv, args.out)
    target = llm.engine.target.model
    judge = Judge(target.path, str(target.dtype).removeprefix("torch."))
    names = ("target", "other", "draft", "repeats", "num_prompts", "max_tokens", "concurrency", "dtype")
    settings = {"settings": {name: getattr(args, name) for name in names}}
    kept = {r["seed"]: r for r in results.matching(args.resume, KIND, settings)}
    found: list[tuple[int, list[float]]] = []
    faults = 0
    try:
        for seed in tqdm(range(args.seeds), unit="seed", disable=None):
            if seed in kept:
                found.append((seed, kept[seed]["ratios"]))
                faults += kept[seed]["faults"]
                continue
            runs = compare(systems, judge, llm, jobs_of(args, llm, seed), range(args.repeats))
            bad = sum(not r.is_equal or (r.stats is not None and r.stats.num_draft_tokens > 0) for r in runs)
            faults += bad
            found.append((seed, ratios_of(runs)))
            file.write(KIND, {"seed": seed, "ratios": found[-1][1], "faults": bad, **settings})
    except KeyboardInterrupt:
        print("interrupted; what was measured follows", file=sys.stderr)
    print(report(found, args.other))
    print(f"{faults} runs differed in text or drafted\nJSON lines: {file.path}")
    covered = sum(holds_one(interval(ratios)) for _, ratios in found)
    return 1 if faults or covered < math.ceil(SHARE * len(found)) else 0


def report(found: Sequence[tuple[int, Sequence[float]]], other: str) -> str:
    """One line a seed, the count, and one interval over all pairs."""
    if not found:
        return "nothing was measured"
    rows = []
    for seed, ratios in found:
        own = interval(ratios)
        rows.append([str(seed), str(own), "yes" if holds_one(own) else "NO"])
    covered = sum(row[-1] == "yes" for row in rows)
    least = math.ceil(SHARE * len(found))
    lines = [
        render(["seed", f"{other} over plain", "holds 1"], rows),
        f"{covered} of {len(found)} intervals hold 1; at least {least} are asked for, which true 95 % intervals "
        f"miss in {chance_of_fewer(least, len(found)):.0%} of such tests",
        f"all pairs together: {interval([ratio for _, ratios in found for ratio in ratios])}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
