"""Overhead: what a step costs on the host when the model costs nothing.

    python -m evals.overhead --rows 1,64,256
    python -m evals.overhead --sampling         what each sampling parameter costs, see `sampling_overhead`

The target is a double that returns canned scores over a small vocabulary, so that planning, packing,
sampling, committing and n-gram lookup are all there is to time. It says nothing of any model's speed.

Beside it: what a controller at zero adds to a step, against fixed length 0, in turn on two engines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from evals import results, sampling_overhead
from evals.flags import numbers, whole, words
from evals.stages import STAGES, WatchedEngine
from evals.table import render
from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import Controller, FixedLength
from specdec.engine import Engine
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.runner import ModelRunner
from specdec.proposers.base import NoDrafts, Proposer
from specdec.proposers.ngram import NgramProposer
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler

KIND, OFF_KIND = "overhead.step", "overhead.off"
VOCAB_SIZE = 512
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64
PERIOD = 48
WARM_UP_STEPS = 20
STRETCH = 25
"""Steps of one engine before it is the other's turn."""


class CannedTarget:
    """Looks like a ModelRunner; the token it favours is a function of the position, repeating itself.

    N-gram lookup is then right, but for one position in sixteen, where the text is unlike its last period.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.features = None
        self.model = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), max_model_len=2**20)
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(PERIOD * 7, VOCAB_SIZE, generator=generator)
        for position in range(PERIOD * 7):
            strange = position % 16 == 15
            self._table[position, position % (PERIOD * 7) if strange else position % PERIOD] += 100.0

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        """The engine's own packing."""
        return ForwardBatch.pack(segments, BLOCK_SIZE, self.device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Look the scores up: [L, V]."""
        return self._table[batch.positions[batch.logits_indices] % len(self._table)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Median microseconds of many steps.

    cpu                 processor time of the stepping thread, which a busy machine disturbs least
    by_stage            of each stage; their sum need not be the median of the whole
    tokens_per_row      tokens emitted per row and step
    """

    proposer: str
    rows: int
    k: int
    num_steps: int
    total: float
    cpu: float
    p90: float
    by_stage: dict[str, float]
    tokens_per_row: float


def never() -> AdaptiveLength:
    """A controller that believes a draft pass to take a thousand seconds, and so is always at zero."""
    costly = Sources(costly=NgramProposer.name)
    return AdaptiveLength(FixedLength(4, None), costly, ForwardCost(512), ForwardCost(512, {1: 1e3, 512: 1e3}))


def build_engine(rows: int, k: int, num_tokens_each: int, controller: Controller | None = None) -> WatchedEngine:
    """A real engine around the double: k = 0 is plain decoding; look-up stands by under a controller of its own."""
    proposer: Proposer = NgramProposer(2, 4) if k or controller is not None else NoDrafts()
    pool = BlockPool(rows * (num_tokens_each // BLOCK_SIZE + 2), BLOCK_SIZE)
    budget = max(rows * (k + 1), NUM_PROMPT_TOKENS * 8)
    engine = Engine(
        cast(ModelRunner, CannedTarget()),
        proposer,
        controller or FixedLength(k, proposer.max_draft_position),
        Scheduler(SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget), pool),
        max_model_len=2**20,
    )
    return WatchedEngine(engine)


def steady_engine(
    rows: int, k: int, num_steps: int, temperature: float, controller: Controller | None = None
) -> WatchedEngine:
    """An engine in which every row decodes, and will for `num_steps` more."""
    most_tokens = NUM_PROMPT_TOKENS + (num_steps + WARM_UP_STEPS + rows) * (k + 1)
    engine = build_engine(rows, k, most_tokens, controller)
    for index in range(rows):
        prompt = [(7 * index + i) % VOCAB_SIZE for i in range(NUM_PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=most_tokens - NUM_PROMPT_TOKENS, temperature=temperature, seed=index)
        engine.add(engine.make_request(f"row-{index}", prompt, params))
    while any(request.num_output_tokens == 0 for request in [*engine.scheduler.running, *engine.scheduler.waiting]):
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()
    return engine


def measure(rows: int, k: int, num_steps: int, temperature: float) -> Measurement:
    """Time steps in which every row decodes."""
    engine = steady_engine(rows, k, num_steps, temperature)
    totals: list[float] = []
    cpu: list[float] = []
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    num_tokens = 0
    for _ in range(num_steps):
        began, cpu_began = time.perf_counter(), time.thread_time()
        gains = engine.step()
        totals.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - cpu_began)
        num_tokens += sum(len(gain.token_ids) for gain in gains)
        for stage, seconds in engine.clock.step.items():
            stages[stage].append(seconds)
    return Measurement(
        proposer="ngram" if k else "none",
        rows=rows,
        k=k,
        num_steps=num_steps,
        total=1e6 * statistics.median(totals),
        cpu=1e6 * statistics.median(cpu),
        p90=1e6 * statistics.quantiles(totals, n=10)[-1],
        by_stage={stage: 1e6 * statistics.median(times) for stage, times in stages.items()},
        tokens_per_row=num_tokens / num_steps / rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """What a controller at zero adds to a step: microseconds of processor time.

    extra       median over pairs of neighbouring stretches; low, high: the 10 % and 90 % points
    num_drafts  drafts made meanwhile
    """

    rows: int
    extra: float
    low: float
    high: float
    num_drafts: int


def measure_off(rows: int, num_steps: int, temperature: float) -> Off:
    """Two engines in turn, one under fixed length 0 and one under a controller that is always at zero."""
    most = num_steps + STRETCH
    plain = steady_engine(rows, 0, most, temperature)
    off = steady_engine(rows, 0, most, temperature, never())
    differences = []
    for pair in range(max(num_steps // STRETCH, 2)):
        first, second = (plain, off) if pair % 2 else (off, plain)
        spent = {id(engine): _stretch(engine) for engine in (first, second)}
        differences.append(1e6 * (spent[id(off)] - spent[id(plain)]) / STRETCH)
    deciles = statistics.quantiles(differences, n=10)
    drafts = sum(request.stats.num_draft_tokens for request in off.scheduler.running)
    median = statistics.median(differences)
    return Off(rows=rows, extra=median, low=deciles[0], high=deciles[-1], num_drafts=drafts)


def _stretch(engine: WatchedEngine) -> float:
    began = time.thread_time()
    for _ in range(STRETCH):
        engine.step()
    return time.thread_time() - began


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.overhead", __doc__)
    add = parser.add_argument
    add("--sampling", action="store_true", help="time sampling parameters instead; the other flags are then its own")
    add("--rows", type=numbers, default=[1, 64, 256])
    add("--k", type=numbers, default=[0, 4], help="draft lengths; 0 is plain decoding")
    add("--steps", type=whole(1), default=300)
    add("--temperature", type=float, default=0.0)
    add("--budget", type=words, default=[], help="rows=microseconds,...: fail where a median is above it")
    add("--off-budget", type=float, help="microseconds: fail where a controller at zero adds more, or drafts")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, save; 1 where a budget was given and missed."""
    if "--sampling" in argv:
        return sampling_overhead.main([word for word in argv if word != "--sampling"])
    args = parse(argv)
    budgets = {int(rows): float(most) for rows, most in (word.split("=") for word in args.budget)}
    file = results.opened("evals.overhead", argv, args.out)
    measured = []
    for rows, k in tqdm([(r, k) for r in args.rows for k in args.k], unit="case", disable=None):
        one = measure(rows, k, args.steps, args.temperature)
        measured.append(one)
        file.write(KIND, {name: getattr(one, name) for name in Measurement.__slots__})
    print(table(measured))
    print(f"\nmicroseconds a step, medians of {args.steps} steps; forward is the double's table look-up. {file.path}")
    is_off_free = report_off(args, file)
    missed = [m for m in measured if m.total > budgets.get(m.rows, float("inf"))]
    for m in missed:
        print(f"rows={m.rows} k={m.k}: {m.total:.0f} us is over {budgets[m.rows]:.0f} us", file=sys.stderr)
    return 1 if missed or not is_off_free else 0


def report_off(args: argparse.Namespace, file: results.ResultFile) -> bool:
    """Measure, save and print what being off costs; False where that is over its budget."""
    is_free = True
    for rows in args.rows:
        off = measure_off(rows, 4 * args.steps, args.temperature)
        file.write(OFF_KIND, asdict(off))
        within = off.num_drafts == 0 and (args.off_budget is None or off.extra <= args.off_budget)
        is_free &= within
        print(
            f"rows={rows}: a controller at zero adds {off.extra:.1f} us a step [{off.low:.1f}, {off.high:.1f}] of "
            f"processor time, {off.num_drafts} drafts{'' if within else ': OVER ITS BUDGET'}"
        )
    return is_free


def table(measured: Sequence[Measurement]) -> str:
    """One line a case."""
    rows = [
        [
            str(m.rows),
            m.proposer,
            str(m.k),
            f"{m.tokens_per_row:.2f}",
            f"{m.total:.0f}",
            f"{m.cpu:.0f}",
            f"{m.p90:.0f}",
            *(f"{m.by_stage[stage]:.0f}" for stage in STAGES),
        ]
        for m in measured
    ]
    return render(["rows", "proposer", "k", "tok/row", "step us", "cpu us", "p90", *STAGES], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
