"""Draft cost: what a draft token costs beside a plain step of the same target, measured in turns.

    python -m evals.draft_cost --target smollm2-135m --draft DIRECTORY

Three engines' worth of steps take turns on the same prompts: plain decoding, decoding with drafts, and decoding
with the draft loaded but asked for nothing (what keeping up costs). Only steps in which every row decodes count.
It says nothing of acceptance.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals import results
from evals.flags import numbers, whole
from evals.table import milliseconds, render
from specdec.batch import Drafts, Plan
from specdec.config import SpeculativeConfig
from specdec.llm import LLM
from specdec.sampling_params import SamplingParams

KIND = "draft_cost"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(slots=True)
class Stopwatch:
    """Stands around one engine's step and its proposer's verbs; one entry a decode step of `rows` rows."""

    llm: LLM
    clock: Callable[[], float] = time.perf_counter
    rows: int = 0
    drafts: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    draft_tokens: list[float] = field(default_factory=list)
    keeping: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine: Any = self.llm.engine
        step = engine.step
        engine.proposer.propose = self._timed("propose", engine.proposer.propose)
        engine.proposer.observe = self._timed("observe", engine.proposer.observe)

        def whole() -> Any:
            self.spent, begun = {}, self.clock()
            emitted = step()
            self._note(self.clock() - begun)
            return emitted

        engine.step = whole

    def _timed(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begun = self.clock()
            answer = verb(*arguments)
            self.spent[name] = self.clock() - begun
            if isinstance(answer, Drafts):
                self._see(arguments[0], answer)
            return answer

        return run

    def _see(self, plan: Plan, drafts: Drafts) -> None:
        self.rows = len(plan) if all(row.chooses and row.num_base == 1 for row in plan) else 0
        self.drafts = max(len(offer.token_ids) for offer in drafts)

    def _note(self, seconds: float) -> None:
        if self.rows and self.spent:
            self.steps.append(seconds)
            self.keeping.append(self.spent["observe"])
            if self.drafts:
                self.draft_tokens.append(self.spent["propose"] / self.drafts)

    def clear(self) -> None:
        """Forget what was measured."""
        self.steps, self.draft_tokens, self.keeping = [], [], []


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians in seconds, at one concurrency by one clock.

    step      a plain step
    token     one more draft a row: drafting divided by its depth
    keeping   what the draft does in a step in which it drafts nothing
    """

    concurrency: int
    clock: str
    step: float
    token: float
    keeping: float


def measure(args: argparse.Namespace) -> list[Measurement]:
    """All concurrencies by each clock, with the three kinds of step in turns."""
    k = SpeculativeConfig(num_speculative_tokens=args.k, adaptive=False)
    plain = Stopwatch(LLM(args.target, None, dtype=args.dtype))
    drafted = Stopwatch(LLM(args.target, args.draft, speculative=k, dtype=args.dtype))
    found = []
    for clock in CLOCKS:
        plain.clock = drafted.clock = CLOCKS[clock]
        found += [_in_turns(args, plain, drafted, clock, concurrency) for concurrency in args.concurrency]
    return found


def _in_turns(
    args: argparse.Namespace, plain: Stopwatch, drafted: Stopwatch, clock: str, concurrency: int
) -> Measurement:
    vocab_size = plain.llm.engine.target.model.vocab_size
    prompts = [[(97 * i + 31 * row) % vocab_size for i in range(args.prompt_tokens)] for row in range(concurrency)]
    tokens: list[float] = []
    keeping: list[float] = []
    plain.clear()
    for _ in range(args.rounds):
        for watch, most in ((plain, None), (drafted, args.k), (drafted, 0)):
            drafted.clear()
            _generate(watch.llm, prompts, most, args.tokens)
            tokens += drafted.draft_tokens
            keeping += drafted.keeping if most == 0 else []
    return Measurement(concurrency, clock, *(statistics.median(values) for values in (plain.steps, tokens, keeping)))


def _generate(llm: LLM, prompts: list[list[int]], most: int | None, max_tokens: int) -> None:
    own = None if most is None else {"num_speculative_tokens": most} if most else {"enabled": False}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, speculative=own)
    llm.generate(prompts, params, progress=False)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.draft_cost", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--draft", required=True)
    add("--dtype", default="auto")
    add("-k", type=int, default=5, help="drafts a step")
    add("--concurrency", type=numbers, default=[1, 8])
    add("--prompt-tokens", type=whole(1), default=128)
    add("--tokens", type=whole(1), default=24, help="emitted by each row of a round")
    add("--rounds", type=whole(1), default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, save."""
    args = parse(argv)
    file = results.opened("evals.draft_cost", argv, args.out)
    measured = measure(args)
    for one in measured:
        file.write(KIND, {name: getattr(one, name) for name in Measurement.__slots__})
    rows = [
        [
            str(m.concurrency), m.clock, milliseconds(m.step), milliseconds(m.token), f"{100 * m.token / m.step:.1f}",
            milliseconds(m.keeping), f"{100 * m.keeping / m.step:.1f}",
        ]
        for m in measured
    ]  # fmt: skip
    print(render(["rows", "clock", "plain step", "draft token", "% of it", "keeping up", "% of it"], rows))
    print(f"milliseconds, medians. {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
