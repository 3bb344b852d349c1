"""Controller cost: what the controller itself takes of a step, verb by verb, where everything else is a double.

    python -m evals.controller_cost --rows 1,8,32

Offers, verdicts and step times are drawn beforehand from a seed; the hybrid that asks the controller between
proposers is the engine's own, and so is what it spends. It knows no model and says nothing of any speed-up.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from evals import results
from evals.flags import numbers, whole, words
from evals.table import render
from specdec.batch import NO_OFFER, Batch, Drafts, Offer, Plan, Row, StepSeconds, Verdict
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import FixedLength
from specdec.proposers.base import Proposer
from specdec.proposers.hybrid import HybridProposer
from specdec.request import Request
from specdec.sampling_params import SamplingParams

KIND = "controller_cost.case"
METHODS = ("ngram", "hybrid", "auto")
VERBS = ("prepare", "budget", "propose", "admit", "observe")
NUM_PROMPT, MAX_TOKENS = 64, 40
MOST = 8
CHANCES = {"ngram": 0.6, "suffix": 0.7, "eagle": 0.5}
OFFERED = {"ngram": 0.4, "suffix": 0.5, "eagle": 1.0}


class DrawnOffers:
    """A proposer that offers with one chance, and says of its drafts what it likes."""

    max_draft_position: int | None = None

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        says = [tuple(rng.uniform(0.2, 0.95) for _ in range(MOST)) for _ in range(256)]
        self._says = itertools.cycle([confidences if rng.random() < OFFERED[name] else () for confidences in says])

    def start(self, request: Request) -> None:
        """Nothing to prepare."""

    def propose(self, plan: Plan) -> Drafts:
        """The next of what was drawn."""
        offers = []
        for row in plan:
            most, says = row.max_drafts, next(self._says)
            offers.append(Offer((1,) * most, self.name, says[:most]) if says and most else NO_OFFER)
        return Drafts(tuple(offers))

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        """Nothing to learn."""

    def stop(self, request: Request) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class Stage:
    """Requests in mid-decode that a controller is led through."""

    controller: AdaptiveLength
    proposer: Proposer
    rng: random.Random
    running: list[Request] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {verb: [] for verb in VERBS})
    num_requests: int = 0
    num_drafts: int = 0

    def step(self) -> None:
        """One step, every verb timed."""
        decoding = self.running
        self.timed("prepare", lambda: self.controller.prepare(decoding, []))
        budgets = self.timed("budget", lambda: [self.controller.budget(request) for request in decoding])
        rows = [Row(r, r.num_tokens - 1, 1, most) for r, most in zip(decoding, budgets, strict=True)]
        plan = Plan(tuple(rows))
        drafts = self.timed("propose", lambda: self.proposer.propose(plan))
        batch = self.timed("admit", lambda: self.controller.admit(plan, drafts))
        verdict = Verdict(tuple((1,) * (self.accepted(row) + 1) for row in batch), (False,) * len(batch))
        noise = self.rng.uniform(0.95, 1.05)
        seconds = StepSeconds(1e-4, noise * (0.010 + 0.0006 * batch.num_tokens))
        self.timed("observe", lambda: self.controller.observe(batch, verdict, seconds))
        self.num_drafts += batch.num_tokens - len(batch)
        for row, emitted in zip(batch, verdict.token_ids, strict=True):
            row.request.token_ids += emitted
            row.request.num_computed_tokens += len(emitted)

    def timed(self, verb: str, run: Callable[[], Any]) -> Any:
        """Run it and note what it took."""
        began = time.thread_time()
        found = run()
        self.seconds[verb].append(time.thread_time() - began)
        return found

    def accepted(self, row: Row) -> int:
        """How many drafts of a row are right."""
        chance = CHANCES.get(row.source, 0.0)
        return next(
            (j for j in range(len(row.draft_token_ids)) if self.rng.random() > chance), len(row.draft_token_ids)
        )

    def refill(self, rows: int) -> None:
        """Those that are done make room for new ones."""
        self.running = [request for request in self.running if request.num_output_tokens < MAX_TOKENS]
        while len(self.running) < rows:
            self.num_requests += 1
            most = MAX_TOKENS + self.rng.randrange(MAX_TOKENS)  # so that they do not end together
            params = SamplingParams(max_tokens=most)
            request = Request(f"r{self.num_requests}", [1] * NUM_PROMPT, params, max_output_tokens=most)
            request.num_computed_tokens = NUM_PROMPT
            request.token_ids.append(1)
            self.running.append(request)


def stage_of(method: str, seed: int) -> Stage:
    """A controller as the assembly makes it, and proposers that are doubles."""
    rng = random.Random(seed)
    verify = ForwardCost(512, {1: 0.0106, 8: 0.0148, 32: 0.03, 128: 0.087})
    draft = ForwardCost(512, {1: 0.001, 8: 0.0012, 32: 0.002}) if method == "auto" else None
    limits = FixedLength(MOST, None)
    if method == "ngram":
        return Stage(AdaptiveLength(limits, Sources(free=("ngram",)), verify), DrawnOffers("ngram", rng), rng)
    costly = DrawnOffers("eagle", rng) if method == "auto" else None
    sources = Sources(free=("ngram", "suffix"), costly=costly and costly.name)
    controller = AdaptiveLength(limits, sources, verify, draft)
    proposer = HybridProposer((DrawnOffers("ngram", rng), DrawnOffers("suffix", rng)), costly, controller)
    return Stage(controller, proposer, rng)


def measure(method: str, rows: int, num_steps: int, seed: int) -> dict[str, Any]:
    """Microseconds of a step processor time by verb: the mean, without the twentieth of the steps that took longest."""
    stage = stage_of(method, seed)
    for index in range(num_steps + 100):
        if index == 100:
            stage.seconds = {verb: [] for verb in VERBS}
        stage.refill(rows)
        stage.step()
    verbs = {verb: _mean(seconds) for verb, seconds in stage.seconds.items()}
    drafts = stage.num_drafts / (num_steps + 100)
    return {"method": method, "rows": rows, "total": sum(verbs.values()), "by_verb": verbs, "drafts": drafts}


def _mean(seconds: Sequence[float]) -> float:
    kept = sorted(seconds)[: max(len(seconds) * 19 // 20, 1)]
    return 1e6 * statistics.fmean(kept)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.controller_cost", __doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--methods", type=words, default=list(METHODS))
    parser.add_argument("--steps", type=whole(1), default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--methods names {', '.join(sorted(unknown))}; known are {', '.join(METHODS)}")
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, print, save."""
    args = parse(argv)
    file = results.opened("evals.controller_cost", argv, args.out, args.seed)
    found = [measure(method, rows, args.steps, args.seed) for method in args.methods for rows in args.rows]
    for one in found:
        file.write(KIND, one)
    rows = [
        [
            m["method"],
            str(m["rows"]),
            *(f"{us:.0f}" for us in (m["total"], *m["by_verb"].values())),
            f"{m['drafts']:.1f}",
        ]
        for m in found
    ]
    print(render(["method", "rows", "step us", *VERBS, "drafts a step"], rows))
    print("processor time; propose is the hybrid and what it asks the controller between proposers")
    print(f"JSON lines: {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
