"""Record: what drafts of a fixed length are worth on real prompts, and what the steps take, for `evals.simulate`.

    python -m evals.record --out recorded.jsonl
    python -m evals.simulate --process recorded.jsonl --world recorded.jsonl

It serves each workload under fixed lengths and writes one line a request (how many drafts were offered in
each step and how many were right) and one of the cost curve. It compares nothing and judges nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import cast

from tqdm import tqdm

from evals import grid, results, workloads
from evals.cost_curve import CostCurve
from evals.flags import numbers, whole, words
from evals.load import Job, closed_loop
from evals.sim_worlds import COST, PROCESS
from evals.stages import StepShape, WatchedEngine
from evals.systems import Setup, encode, load
from specdec import LLM, SpeculativeParams
from specdec.batch import Batch, StepSeconds, Verdict
from specdec.controller import Controller, FixedLength

METHODS = ("ngram", "suffix", "hybrid")


class Listener(FixedLength):
    """Fixed lengths, with a note of every row's drafts.

    drafts   request -> (drafts offered, drafts right) of each step that could have had some
    """

    def __init__(self, k: int, max_draft_position: int | None, steps: list[StepShape]) -> None:
        super().__init__(k, max_draft_position)
        self.drafts: dict[str, list[tuple[int, int]]] = {}
        self.steps = steps

    def observe(self, batch: Batch, verdict: Verdict, seconds: StepSeconds) -> None:
        """Note it."""
        self.steps.append(StepShape.of(batch, seconds))
        for index, row in enumerate(batch):
            if row.max_drafts:
                pair = (len(row.draft_token_ids), verdict.num_accepted(index))
                self.drafts.setdefault(row.request.request_id, []).append(pair)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.record", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--method", choices=METHODS, default="ngram", help="look-ups, whose drafting costs no forward")
    add("--workloads", type=words, default=["chat", "code", "extract", "adversarial"])
    add("--num-prompts", type=whole(1), default=8, help="of each workload")
    add("--max-tokens", type=whole(1), default=64)
    add("--concurrency", type=numbers, default=[1, 4, 8, 16, 32], help="for the costs; the drafts are alike in all")
    add("--k", type=numbers, default=[0, 1, 5], help="draft lengths for the costs; drafts are recorded at the longest")
    add("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    if max(args.k) < 1:
        parser.error("--k needs a length of at least 1")
    return args


def make_jobs(args: argparse.Namespace, llm: LLM) -> dict[str, list[Job]]:
    """Jobs by workload."""
    made = {}
    for name in args.workloads:
        prompts = workloads.take(grid.prompts(name), args.num_prompts)
        heat = grid.TEMPERATURE.get(name, 0.0)
        made[name] = [Job(p, encode(llm, p), args.max_tokens, heat, i) for i, p in enumerate(prompts)]
    return made


def serve(engine: WatchedEngine, jobs: Sequence[Job], concurrency: int, k: int) -> Listener:
    """The jobs once, under a fixed length."""
    listener = Listener(k, engine.proposer.max_draft_position, engine.steps)
    engine.controller = cast(Controller, listener)
    closed_loop(engine, jobs, concurrency, SpeculativeParams(enabled=k > 0, num_speculative_tokens=k))
    return listener


def main(argv: Sequence[str]) -> int:
    """Serve, write."""
    args = parse(argv)
    most = max(args.concurrency)
    setup = Setup(
        target=args.target, draft=None, dtype=args.dtype, ks=tuple(args.k), max_concurrency=most,
        max_tokens=args.max_tokens,
    )  # fmt: skip
    if args.out is not None and args.out.exists():
        print(f"evals.record: {args.out} exists, and one file holds one recording", file=sys.stderr)
        return 2
    llm = load(setup, args.method, 1024)
    file = results.opened("evals.record", argv, args.out)
    by_name = make_jobs(args, llm)
    engine, deepest = WatchedEngine(llm.engine), max(args.k)
    serve(engine, [job for own in by_name.values() for job in own][:most], most, deepest)
    engine.steps.clear()  # the first run was to warm up
    everything = [job for own in by_name.values() for job in own]
    runs = [(c, k) for c in args.concurrency for k in args.k if (c, k) != (args.concurrency[0], deepest)]
    with tqdm(total=len(by_name) + len(runs), unit="run", disable=None) as bar:
        for name, jobs in by_name.items():
            for request_id, drafts in serve(engine, jobs, args.concurrency[0], deepest).drafts.items():
                file.write(PROCESS, {"workload": name, "request": request_id, "source": args.method, "drafts": drafts})
            bar.update()
        for concurrency, k in runs:
            serve(engine, everything[:: max(len(everything) // (2 * concurrency), 1)], concurrency, k)
            bar.update()
    curve = CostCurve(engine.steps)
    file.write(COST, {"by_tokens": curve.by_tokens(), "per_prompt": curve.per_prompt})
    print(f"{file.path}: {len(everything)} requests, costs of {len(engine.steps)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
