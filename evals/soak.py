"""Soak: random requests against random pools for as long as one likes, integrity checked after every step.

    python -m evals.soak --requests 500

Arrivals, lengths, temperatures, stop tokens, draft lengths and aborts are random from a seed. Each
request's text is held against a plain run alone in a big pool, in float64, where no rounding excuses
a difference. It measures no speed.
"""

from __future__ import annotations

import argparse
import atexit
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from evals import results
from evals.flags import above, whole, words
from specdec import LLM, SamplingParams, SpeculativeConfig, SpeculativeParams
from specdec.engine import Engine
from specdec.request import Request

KIND = "soak.round"
BLOCK_SIZE = 4
MAX_PROMPT, MAX_OUTPUT, MAX_DRAFTS = 40, 24, 6
POOLS = (20, 28, 48, 96, 400)
"""Blocks; the smallest hold little more than one request of the greatest length."""
REQUESTS_A_ROUND = 20


@dataclass(frozen=True, slots=True)
class Wish:
    """One random request.

    arrival       step at which it is submitted
    abort_after   steps after which it is aborted; None: never
    """

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort_after: int | None


@dataclass(slots=True)
class Tally:
    """What was seen so far; a violation is a sentence."""

    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def preemptions_per_finished(self) -> float:
        """Recomputation is the price of a small pool; this says how often it was paid."""
        return self.num_preemptions / self.num_finished if self.num_finished else 0.0


def make_wishes(noise: random.Random, vocab_size: int, count: int) -> list[Wish]:
    """Random requests; half share a beginning, so that the prefix cache has work."""
    shared = [noise.randrange(vocab_size) for _ in range(MAX_PROMPT)]
    wishes = []
    for _ in range(count):
        length = noise.randint(1, MAX_PROMPT)
        kept = noise.randint(0, length) if noise.random() < 0.5 else 0
        prompt = shared[:kept] + [noise.randrange(vocab_size) for _ in range(length - kept)]
        if noise.random() < 0.3:  # something for n-gram lookup to find
            prompt = (prompt[:8] * MAX_PROMPT)[:length]
        params = SamplingParams(
            temperature=noise.choice([0.0, 0.0, 0.7, 1.2]),
            seed=noise.randrange(2**31),
            max_tokens=noise.randint(1, MAX_OUTPUT),
            stop_token_ids=[noise.randrange(vocab_size) for _ in range(noise.choice([0, 0, 10, 40]))],
            speculative=SpeculativeParams(
                enabled=noise.random() < 0.85, num_speculative_tokens=noise.choice([None, 1, MAX_DRAFTS])
            ),
        )
        abort_after = noise.randint(0, 12) if noise.random() < 0.15 else None
        wishes.append(Wish(prompt, params, noise.randint(0, count), abort_after))
    return sorted(wishes, key=lambda wish: wish.arrival)


def expected(reference: Engine, wish: Wish) -> list[int]:
    """What the request says alone, undrafted, in a pool with room for everything."""
    request = reference.make_request("reference", wish.prompt, wish.params)
    reference.add(request)
    while reference.has_work:
        reference.step()
    return request.output_token_ids


def run_round(
    engine: Engine, wishes: Sequence[Wish], references: Sequence[list[int]], tally: Tally, where: str
) -> None:
    """Serve the wishes at their steps; every complaint goes to the tally."""
    waiting = list(enumerate(wishes))
    requests: list[Request] = []
    deadlines: dict[str, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1].arrival <= step:
            index, wish = waiting.pop(0)
            request = engine.make_request(f"{where}-{index}", wish.prompt, wish.params)
            engine.add(request)
            requests.append(request)
            if wish.abort_after is not None:
                deadlines[request.request_id] = step + wish.abort_after
        for request_id in [r for r, deadline in deadlines.items() if deadline <= step]:
            engine.abort(request_id)
            del deadlines[request_id]
        engine.step()
        step += 1
        try:
            engine.scheduler.check_integrity()
        except AssertionError as error:
            tally.violations.append(f"{where}, step {step}: {error}")
            return
    tally.num_steps += step
    _check(engine, requests, references, tally, where)


def _check(
    engine: Engine, requests: Sequence[Request], references: Sequence[list[int]], tally: Tally, where: str
) -> None:
    pool = engine.scheduler.pool
    if pool.num_free_blocks != pool.num_blocks:
        tally.violations.append(f"{where}: {pool.num_blocks - pool.num_free_blocks} blocks are held by nobody")
    for request, reference in zip(requests, references, strict=True):
        tally.num_preemptions += request.stats.num_preemptions
        tally.num_draft_tokens += request.stats.num_draft_tokens
        tally.num_accepted_tokens += request.stats.num_accepted_tokens
        reason = request.finish_reason.value if request.finish_reason else None
        output = request.output_token_ids
        if reason == "abort":
            tally.num_aborted += 1
            reference = reference[: len(output)]
        elif reason in ("stop", "length"):
            tally.num_finished += 1
        else:
            tally.violations.append(f"{where}: {request.request_id} ended with {reason}: {request.error}")
            continue
        if output != reference:
            tally.violations.append(f"{where}: {request.request_id} said {output}, alone and plain it says {reference}")


def engines(args: argparse.Namespace) -> Iterator[tuple[str, Engine]]:
    """Every proposer over every pool size, smallest first, again and again."""
    cache: dict[tuple[str, int], Engine] = {}
    while True:
        for num_blocks in POOLS:
            for method in args.methods:
                if (method, num_blocks) not in cache:
                    cache[method, num_blocks] = _load(args, method, num_blocks).engine
                yield f"{method}, {num_blocks} blocks", cache[method, num_blocks]


def _load(args: argparse.Namespace, method: str, num_blocks: int) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float64", "block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks, "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    draft = {"plain": None, "ngram": "ngram", "draft": args.draft, "self": args.target}[method]
    if draft is None:
        return LLM(args.target, None, **options)
    speculative = SpeculativeConfig(num_speculative_tokens=MAX_DRAFTS, adaptive=False)  # as many drafts as can be
    return LLM(args.target, draft, speculative=speculative, **options)


def soak(args: argparse.Namespace, tally: Tally, save: Callable[[dict[str, Any]], None]) -> None:
    """Rounds until the requests or the minutes are used up, or something is wrong."""
    noise = random.Random(args.seed)
    reference = _load(args, "plain", POOLS[-1]).engine
    vocab_size = reference.target.model.vocab_size
    ends = time.monotonic() + 60 * args.minutes
    num_done = 0
    with tqdm(total=args.requests, desc="soaking", unit="req", disable=None) as bar:
        for where, engine in engines(args):
            if num_done >= args.requests or time.monotonic() >= ends or tally.violations:
                return
            wishes = make_wishes(noise, vocab_size, REQUESTS_A_ROUND)
            run_round(engine, wishes, [expected(reference, wish) for wish in wishes], tally, where)
            num_done += len(wishes)
            bar.set_postfix_str(where)
            bar.update(len(wishes))
            save({"where": where, "num_requests": num_done, "rss_mib": _rss_mib(), **_counts(tally)})


def _rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def _counts(tally: Tally) -> dict[str, Any]:
    counts = {name: getattr(tally, name) for name in Tally.__slots__}
    return counts | {"preemptions_per_finished": tally.preemptions_per_finished}


def _toy(folder: Path, num_layers: int) -> str:
    """A Llama of random weights, small enough to take thousands of steps a minute."""
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(num_layers)
    AutoModelForCausalLM.from_config(config).to(torch.float64).save_pretrained(folder)
    return str(folder)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = results.parser("evals.soak", __doc__)
    add = parser.add_argument
    add("--target", help="a small model: it runs in float64; without it toys with random weights are made")
    add("--draft", help="a second one of the same tokenizer, for method draft")
    add("--methods", type=words, help="of plain,ngram,draft,self (the target drafts for itself); default: all that can")
    add("--minutes", type=above(0), default=float("inf"))
    add("--requests", type=whole(1), default=400)
    add("--seed", type=int, default=0)
    add("--threads", type=whole(1), default=1, help="of torch; a toy is fastest on one")
    args = parser.parse_args(argv)
    if args.target is None:
        folder = Path(tempfile.mkdtemp(prefix="specdec-soak-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        args.target, args.draft = _toy(folder / "target", 3), _toy(folder / "draft", 1)
    args.methods = args.methods or ["plain", "ngram", "self", *(["draft"] if args.draft else [])]
    unknown = set(args.methods) - {"plain", "ngram", "self", "draft"}
    if unknown or ("draft" in args.methods and not args.draft):
        parser.error("--methods takes plain, ngram, self and, with --draft DIRECTORY, draft")
    return args


def main(argv: Sequence[str]) -> int:
    """Soak, print, save; 1 on any violation, 130 after Ctrl-C."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    file = results.opened("evals.soak", argv, args.out, args.seed)
    tally = Tally()
    memory: list[float] = []

    def save(values: dict[str, Any]) -> None:
        memory.append(values["rss_mib"])
        file.write(KIND, values)

    is_interrupted = False
    try:
        soak(args, tally, save)
    except KeyboardInterrupt:
        is_interrupted = True
    print(_report(tally, memory, len(POOLS) * len(args.methods)))
    print(f"JSON lines: {file.path}")
    return 1 if tally.violations or not tally.num_finished else 130 if is_interrupted else 0


def _report(tally: Tally, memory: Sequence[float], num_engines: int) -> str:
    lines = [
        f"{tally.num_finished} finished, {tally.num_aborted} aborted, {tally.num_steps} steps",
        f"{tally.num_preemptions} preemptions, {tally.preemptions_per_finished:.3f} per finished request",
        f"{tally.num_draft_tokens} drafts judged, {tally.num_accepted_tokens} accepted",
    ]
    if len(memory) > num_engines + 1:
        grown = memory[-1] - memory[num_engines]
        lines.append(f"memory {memory[-1]:.0f} MiB, {grown:+.1f} since every engine was built")
    return "\n".join([*lines, *(f"VIOLATION {violation}" for violation in tally.violations)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
