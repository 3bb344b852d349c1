"""Sampling overhead: what each parameter costs where the target's scores become tokens.

    python -m evals.overhead --sampling

It times the judging of 64 rows of 5 positions over a vocabulary of 49,152 on made-up scores, for one
parameter at a time, and sets the time beyond the plain case against a forward of a real target that
yields as many rows: where any parameter but structured output takes 15 % of it or more, the command says so
and fails. It says nothing of what a parameter does to the text or to acceptance.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evals import results
from evals.flags import whole
from evals.table import render
from specdec.batch import Batch, Row
from specdec.llm import LLM
from specdec.models.forward_batch import Segment
from specdec.request import Request
from specdec.sampling import verify
from specdec.sampling_params import SamplingParams

KIND = "overhead.sampling"
NUM_PROMPT_TOKENS = 128
NUM_OUTPUT_TOKENS = 128

CASES: dict[str, dict[str, Any]] = {
    "temperature=0": {"temperature": 0},
    "temperature": {},
    "top_k=50": {"top_k": 50},
    "top_p=.9": {"top_p": 0.9},
    "top_p=.9 of a flat law": {"top_p": 0.9, "temperature": 3.0},
    "top_k=50 top_p=.9": {"top_k": 50, "top_p": 0.9},
    "min_p=.05": {"min_p": 0.05},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.1},
    "logit_bias x100": {"logit_bias": {7 * i: 1.0 for i in range(100)}},
    "allowed x1000": {"allowed_token_ids": list(range(0, 7000, 7))},
    "stop ids, min_tokens": {"stop_token_ids": [5, 6], "min_tokens": 2**20, "max_tokens": None},
    "all of them": {
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {7: 1.0},
    },
    "logprobs=0": {"logprobs": 0},
    "logprobs=20": {"logprobs": 20},
}
PLAIN = "temperature"
STRUCTURED = "json schema"
MOST_SHARE = 0.15
"""Of a forward that yields as many rows, what any plain parameter may take beyond sampling itself."""

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "sold"]}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    },
    "required": ["id", "name", "tags", "place"],
    "additionalProperties": False,
}
JSON_TEXT = '{"id": 4711, "name": "a chair of oak and a cushion", "tags": ["new", "sold"], "place": {"x": 1, "y": -20}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Median milliseconds of one case; `beyond` is what it takes more than temperature alone."""

    case: str
    rows: int
    positions: int
    vocab_size: int
    dtype: str
    total: float
    beyond: float
    forward: float | None


def median_ms(action: Callable[[], object], times: int) -> float:
    """Milliseconds of the middle one of several runs, after two to warm up: processor time of all threads."""
    spent = []
    for _ in range(times + 2):
        began = time.process_time()
        action()
        spent.append(1e3 * (time.process_time() - began))
    return statistics.median(spent[2:])


def make_batch(rows: int, positions: int, vocab_size: int, params: dict[str, Any]) -> Batch:
    """Rows in mid-output, each with positions - 1 drafts; none of their tokens are alike."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(rows):
        tokens = torch.randint(vocab_size, (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS + positions,), generator=generator)
        tokens_list = tokens.tolist()
        own = SamplingParams(seed=index, **params)
        stop_ids = frozenset(own.stop_token_ids or ())
        request = Request(
            f"row-{index}", tokens_list[:NUM_PROMPT_TOKENS], own, noise_seed=index, max_output_tokens=2**30,
            stop_token_ids=stop_ids,
        )  # fmt: skip
        request.extend(tokens_list[NUM_PROMPT_TOKENS:-positions])
        drafts = tuple(tokens_list[-positions:-1])
        made.append(Row(request, request.num_tokens - 1, 1, len(drafts), drafts))
    return Batch(tuple(made))


def make_structured_batch(target: LLM, rows: int, positions: int) -> Batch:
    """Rows at every place of a JSON text, with the tokens behind it as drafts; nothing of their masks is known yet."""
    assert target.tokenizer is not None
    tokens = target.tokenizer.encode(JSON_TEXT, add_special_tokens=False)
    params = SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=None, seed=0)
    made = []
    for index in range(rows):
        place = index % (len(tokens) - positions)
        request = target.engine.make_request(f"row-{index}", [1] * NUM_PROMPT_TOKENS, params)
        request.extend(tokens[:place])
        assert not request.error
        drafts = tuple(tokens[place : place + positions - 1])
        made.append(Row(request, request.num_tokens - 1, 1, len(drafts), drafts))
    return Batch(tuple(made))


def made_up_scores(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Scores with a head and a tail like a language model's: a normal body under a few hundred tokens of Zipf's law."""
    generator = torch.Generator().manual_seed(1)
    scores = 1.5 * torch.randn(rows, vocab_size, generator=generator)
    head = torch.rand(rows, vocab_size, generator=generator).topk(min(300, vocab_size), dim=1).indices
    scores.scatter_(1, head, 17.0 - 1.5 * torch.log(1.0 + torch.arange(head.shape[1])).expand_as(head))
    return scores.to(dtype)


def forward_ms(made: LLM, rows: int, positions: int, times: int) -> float:
    """A forward of the real target that scores as many rows, behind prompts of the same length."""
    runner = made.engine.target
    length = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
    per_row = -(-(length + positions) // runner.cache.block_size)
    num_blocks = made.engine.scheduler.pool.num_blocks
    tables = [[(r * per_row + i) % num_blocks for i in range(per_row)] for r in range(rows)]
    segments = [Segment([5] * positions, length, table, positions) for table in tables]
    return median_ms(lambda: runner.forward(runner.pack(segments)), times)


def measure(args: argparse.Namespace) -> list[Measurement]:
    """Every case on the same scores; structured output and the forward only where a target is named."""
    rows, positions = args.rows, args.positions
    made = None
    if args.target != "none":
        budget = max(512, rows * positions)
        made = LLM(args.target, None, dtype=args.dtype, max_num_batched_tokens=budget, max_num_seqs=rows)
    forward = None if made is None else forward_ms(made, rows, positions, args.times)
    scores = made_up_scores(rows * positions, args.vocab_size, getattr(torch, args.dtype))
    totals: dict[str, float] = {}
    for case in tqdm(CASES, unit="case", disable=None):
        batch = make_batch(rows, positions, args.vocab_size, CASES[case])
        totals[case] = median_ms(lambda batch=batch: verify(batch, scores), args.times)  # type: ignore[misc]
    if made is not None:
        scores = made_up_scores(rows * positions, made.engine.target.model.vocab_size, getattr(torch, args.dtype))
        fresh = iter([make_structured_batch(made, rows, positions) for _ in range(args.times + 2)])
        totals[STRUCTURED] = median_ms(lambda: verify(next(fresh), scores), args.times)
    return [
        Measurement(
            case=case,
            rows=rows,
            positions=positions,
            vocab_size=args.vocab_size,
            dtype=args.dtype,
            total=total,
            beyond=total - totals[PLAIN],
            forward=forward,
        )
        for case, total in totals.items()
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.overhead --sampling", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--rows", type=whole(1), default=64)
    add("--positions", type=whole(1), default=5)
    add("--vocab-size", type=whole(1), default=49_152)
    add("--dtype", default="bfloat16")
    add("--times", type=whole(1), default=7)
    add("--target", default="smollm2-135m", help="whose forward is timed; none: no forward (default: %(default)s)")
    add("--out", type=Path, help="JSON lines are appended here; default: a new file under results/")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, save."""
    args = parse(argv)
    path = args.out or results.default_path("evals.overhead")
    file = results.ResultFile(path, results.describe("evals.overhead", ["--sampling", *argv], 0))
    measured = measure(args)
    for one in measured:
        file.write(KIND, {name: getattr(one, name) for name in Measurement.__slots__})
    print(table(measured))
    forward = measured[0].forward
    print(
        f"\n{args.rows} rows x {args.positions} positions x {args.vocab_size}, {args.dtype}, "
        f"{torch.get_num_threads()} threads, processor time, medians of {args.times}; forward "
        + ("not measured" if forward is None else f"{forward:.1f} ms")
        + f". {path}"
    )
    late = too_dear(measured)
    for one in late:
        print(f"{one.case}: {one.beyond:.1f} ms is {MOST_SHARE:.0%} of the forward or more", file=sys.stderr)
    if forward is not None and not late:
        print(f"every plain parameter takes less than {MOST_SHARE:.0%} of the forward")
    return int(bool(late))


def too_dear(measured: Sequence[Measurement]) -> list[Measurement]:
    """Plain parameters that take more of a forward than they may."""
    plain = [m for m in measured if m.case != STRUCTURED and m.forward is not None]
    return [m for m in plain if m.forward is not None and m.beyond >= MOST_SHARE * m.forward]


def table(measured: Sequence[Measurement]) -> str:
    """One line a case."""

    def share(one: Measurement, milliseconds: float) -> str:
        return "-" if one.forward is None else f"{100 * milliseconds / one.forward:.1f} %"

    rows = [[m.case, f"{m.total:.1f}", f"{m.beyond:+.1f}", share(m, m.total), share(m, m.beyond)] for m in measured]
    return render(["parameter", "ms", "beyond plain", "of forward", "beyond, of forward"], rows)
