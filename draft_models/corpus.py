"""Corpus: prompts with the target's own answers, as token ids with the place where the answer begins.

It knows the data file, the chat template and the split into training and held-out prompts. It does not
know features, heads or losses.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation turn.

    ids            prompt through the chat template, then the answer (with its end token where it ended)
    answer_start   index in `ids` of the first token of the answer
    """

    ids: tuple[int, ...]
    answer_start: int
    category: str
    temperature: float


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, gzipped or not; every line needs a `prompt` (or Spec-Bench's `turns`)."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    for number, record in enumerate(records, 1):
        if "prompt" not in record:
            if not record.get("turns"):
                raise ValueError(f"line {number} of {path} has neither 'prompt' nor 'turns'")
            record["prompt"] = record["turns"][0]
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def file_hash(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The ids a chat server gives the target for a first user message."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def encode(record: dict[str, Any], tokenizer: Any, eos_token_id: int, most: int, answer_most: int) -> Example:
    """One record as an Example of at most `most` tokens.

    An answer shorter than `answer_most` tokens is taken to have ended by itself, so its end token is added.
    A prompt that leaves no room loses its beginning: the rows near the answer are those that matter.
    """
    if "response_ids" in record:
        answer = list(record["response_ids"])
    else:
        answer = list(tokenizer(record["response"], add_special_tokens=False).input_ids)
        if len(answer) < answer_most - 4:  # re-encoding may merge a few tokens of an answer that was cut
            answer.append(eos_token_id)
    prompt = prompt_ids(tokenizer, record["prompt"])
    answer = answer[: most - 1]
    prompt = prompt[-(most - len(answer)) :]
    category = str(record.get("source") or record.get("category") or "all")
    return Example((*prompt, *answer), len(prompt), category, float(record.get("temperature", 0.0)))


def split(records: Sequence[dict[str, Any]], heldout_percent: float) -> tuple[list[Any], list[Any]]:
    """Training and held-out records, by a hash of the prompt: all answers to one prompt fall on one side."""
    training: list[Any] = []
    heldout: list[Any] = []
    for record in records:
        place = int.from_bytes(hashlib.sha256(record["prompt"].encode()).digest()[:4], "big") / 2**32
        (heldout if place < heldout_percent / 100 else training).append(record)
    return training, heldout


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    """The items in an order that depends on the seed alone."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


def frequent_ids(examples: Iterable[Example], size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """The `size` most frequent answer tokens, ascending; ties go to the lower id.

    Where the data hold fewer kinds, the lowest unseen ids fill the list (a byte-pair vocabulary gives low ids
    to frequent merges).
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.ids[example.answer_start :])
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    chosen = dict.fromkeys([*always, *ranked][:size])
    unseen = (i for i in range(10**9) if i not in chosen)
    while len(chosen) < size:
        chosen[next(unseen)] = None
    return torch.tensor(sorted(chosen), dtype=torch.int64)
