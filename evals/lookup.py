"""Lookup offline: what n-gram, suffix and hybrid would have had accepted on recorded greedy answers.

It replays answers token by token without a model, so it costs seconds, and it measures the suffix store:
memory, and the processor time of a lookup; and how well calibrated the controller's beliefs are on these
answers. It knows nothing of the speed of an engine.

    python -m evals.lookup --record answers.jsonl --questions spec_bench.jsonl --num-per-category 3
    python -m evals.lookup --answers answers.jsonl
    python -m evals.lookup --store-tokens 1000000
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from evals import explain
from evals.flags import whole
from evals.table import render
from specdec import LLM, SamplingParams
from specdec.batch import Offer, Plan, Row
from specdec.control.acceptance import Acceptance, Ask, Outcome
from specdec.proposers.base import MostExpected, Proposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.past_outputs import PastOutputs
from specdec.proposers.suffix import SuffixProposer, follow
from specdec.request import Request

BUCKETS = 10


class Tally:
    """Steps and tokens of one proposer, and how its confidences compare with what was accepted."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = self.num_drafting = 0
        self.judged: list[list[int]] = [[0, 0] for _ in range(BUCKETS)]

    def add(self, offer: Offer, answer: Sequence[int]) -> int:
        """Judge one offer against what the target said; return the tokens the step emits."""
        accepted = 0
        for draft, right, sure in zip(offer.token_ids, answer[:-1], offer.confidences, strict=False):
            bucket = self.judged[min(int(sure * BUCKETS), BUCKETS - 1)]
            bucket[1] += 1
            if draft != right:
                break
            bucket[0] += 1
            accepted += 1
        self.num_steps += 1
        self.num_drafting += bool(offer.token_ids)
        self.num_tokens += accepted + 1
        return accepted + 1


def replay(proposer: Proposer, prompt: list[int], answer: list[int], k: int, tally: Tally) -> None:
    """One request, as a step would see it: base token, offer, verdict."""
    request = Request("replayed", prompt, SamplingParams(), max_output_tokens=len(answer))
    proposer.start(request)
    done = 0
    while done < len(answer):
        row = Row(request, request.num_tokens - 1, 1, min(k, request.max_drafts))
        gained = tally.add(proposer.propose(Plan((row,))).offers[0], answer[done:])
        request.extend(answer[done : done + gained])
        done += gained
    proposer.stop(request)


def makers(shortest: int) -> dict[str, Callable[[], Proposer]]:
    """The proposers that cost no forward."""
    return {
        "ngram": lambda: NgramProposer(shortest, 4),
        "suffix": lambda: SuffixProposer(shortest),
        "hybrid": lambda: HybridProposer([NgramProposer(shortest, 4), SuffixProposer(shortest)], None, MostExpected()),
    }


def compare(answers: Sequence[dict], k: int) -> str:
    """Mean acceptance length per category, and the calibration of the suffix proposer's confidences."""
    names = [(least, name) for least in (2, 1) for name in makers(least)]
    tallies: dict[tuple[str, int, str], Tally] = defaultdict(Tally)
    for least, name in names:
        for one in answers:
            for category in (one["category"], "all"):
                replay(makers(least)[name](), list(one["prompt"]), one["answer"], k, tallies[category, least, name])
    categories = [*sorted({one["category"] for one in answers}), "all"]
    rows = [
        [
            category,
            *(
                f"{t.num_tokens / t.num_steps:.2f} ({t.num_drafting / t.num_steps:.0%})"
                for t in (tallies[category, least, name] for least, name in names)
            ),
        ]
        for category in categories
    ]
    text = render(["category", *(f"{name} >={least}" for least, name in names)], rows)
    judged = tallies["all", 1, "suffix"].judged
    sure = [
        [f"{i / BUCKETS:.1f}-{(i + 1) / BUCKETS:.1f}", str(n), f"{right / n:.2f}"]
        for i, (right, n) in enumerate(judged)
        if n
    ]
    return f"{text}\n\n{render(['confidence (suffix >=1)', 'drafts judged', 'accepted'], sure)}"


def believed(proposer: Proposer, answers: Sequence[dict], k: int, least: float) -> list[tuple[float, bool]]:
    """What the controller's estimate said of each draft and whether it was right, one answer after the other.

    least   drafts that are less likely to be reached and accepted are not admitted, as a controller would
    """
    acceptance, step = Acceptance(), 0
    judged: list[tuple[float, bool]] = []
    for index, one in enumerate(answers):
        answer = one["answer"]
        request = Request(str(index), list(one["prompt"]), SamplingParams(), max_output_tokens=len(answer))
        proposer.start(request)
        while (done := request.num_output_tokens) < len(answer):
            step += 1
            row = Row(request, request.num_tokens - 1, 1, min(k, request.max_drafts))
            offer = proposer.propose(Plan((row,))).offers[0]
            (chances,) = acceptance.chances([_ask(request, offer)], step)
            offer = offer.cut(int((np.cumprod(chances) > least).sum()))
            pairs = zip(offer.token_ids, answer[done:])
            accepted = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            drafted = len(offer.token_ids)
            judged += [(float(chances[j]), j < accepted) for j in range(min(accepted + 1, drafted))]
            if drafted:
                outcome = Outcome(request.request_id, offer.source, drafted, accepted, offer.confidences)
                acceptance.learn([outcome], step)
            request.extend(answer[done : done + accepted + 1])
        proposer.stop(request)
    return judged


def _ask(request: Request, offer: Offer) -> Ask:
    return Ask(request.request_id, offer.source, len(offer.token_ids), offer.confidences)


def calibration(answers: Sequence[dict], k: int) -> str:
    """The controller's calibration by proposer, with every draft admitted and with only the likely ones."""
    return "\n".join(
        f"controller over {name} >=2, drafts above {least:g} admitted: "
        f"{explain.calibration(believed(make(), answers, k, least))}"
        for name, make in makers(2).items()
        for least in (0.0, 0.3)
    )


def record(path: Path, questions: Path, num_per_category: int, max_tokens: int) -> None:
    """Greedy answers of the default target to the first questions of every category."""
    picked: dict[str, list[dict]] = defaultdict(list)
    for line in questions.read_text().splitlines():
        question = json.loads(line)
        if len(picked[question["category"]]) < num_per_category:
            picked[question["category"]].append(question)
    chosen = [question for group in picked.values() for question in group]
    llm = LLM(draft=None, dtype="float32", max_num_seqs=16)
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": q["turns"][0]}]) for q in chosen]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    with path.open("w") as file:
        for question, output in zip(chosen, outputs, strict=True):
            ids = {"prompt": output.prompt_token_ids, "answer": output.outputs[0].token_ids}
            file.write(json.dumps({"category": question["category"], **ids}) + "\n")


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def measure_store(num_tokens: int, num_lookups: int = 2000) -> str:
    """Fill a store of texts that quote one another, and look up ends of them."""
    rng = random.Random(0)
    store = PastOutputs(2 * num_tokens + 10_000)
    before = time.process_time()
    resident = _resident_bytes()
    while store.num_tokens < num_tokens:
        text = [int(rng.paretovariate(0.6)) % 49152 for _ in range(250)]
        if store.num_tokens and rng.random() < 0.5:
            seen, start = store.parts("owner")[0].text, rng.randrange(store.num_tokens)
            text[20:140] = [token for token in seen[start : start + 120] if token >= 0]
        store.add("owner", text)
    memory = _resident_bytes() - resident
    building = time.process_time() - before
    part = store.parts("owner")[0]
    seconds = []
    for _ in range(num_lookups):
        end = rng.randrange(64, len(part))
        tail: array[int] = part.text[end - 64 : end]
        before = time.thread_time()
        match = part.find(tail)
        if match is not None:
            follow(part.text, match, 5)
        seconds.append(time.thread_time() - before)
    micro = [1e6 * s for s in seconds]
    return (
        f"{len(part)} tokens: {memory / 1e6:.0f} MB resident; built in {1e6 * building / len(part):.1f} us a token; "
        f"lookup with an offer of 5: median {statistics.median(micro):.1f} us, "
        f"mean {statistics.mean(micro):.1f} us, "
        f"p99 {statistics.quantiles(micro, n=100)[-1]:.1f} us of processor time"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evals.lookup", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--answers", type=Path, help="JSON lines of category, prompt (ids) and answer (ids), to replay")
    add("--k", type=int, default=5, help="most drafts a step")
    add("--record", type=Path, help="write such a file with the default target")
    add("--questions", type=Path, help="JSON lines of category and turns, for --record")
    add("--num-per-category", type=whole(1), default=3)
    add("--max-tokens", type=whole(1), default=128)
    add("--store-tokens", type=whole(1), help="measure a suffix store of so many tokens")
    args = parser.parse_args(argv)
    if args.record is not None and args.questions is None:
        parser.error("--record needs --questions FILE")
    if args.record is None and args.answers is None and args.store_tokens is None:
        parser.error("nothing to do: give --answers, --record or --store-tokens")
    return args


def main(argv: Sequence[str]) -> int:
    """Record, replay, measure: whatever was asked for."""
    args = parse(argv)
    if args.record is not None:
        record(args.record, args.questions, args.num_per_category, args.max_tokens)
    if args.answers is not None:
        answers = [json.loads(line) for line in args.answers.read_text().splitlines()]
        print(f"mean acceptance length at k={args.k} (share of steps that draft), {len(answers)} answers\n")
        print(compare(answers, args.k))
        print("\n" + calibration(answers, args.k))
    if args.store_tokens is not None:
        print(measure_store(args.store_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
