"""Answers: prompts that have none are given the target's own, by our own engine.

It knows prompts and the engine's public face. What is done is on disk at once, so an interrupt loses one batch.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draft_models.corpus import prompt_ids
from specdec import LLM, SamplingParams

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # half greedy, the rest sampled, in turn
BATCH = 64  # prompts given to the engine at once


def complete(
    records: Sequence[dict[str, Any]],
    target: str,
    path: Path,
    max_tokens: int = 256,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[dict[str, Any]]:
    """Every record with an answer; those that lack one get it from the target.

    path           JSON lines of the answers generated so far; read first, then appended to
    temperatures   taken in turn; sampled answers use top_p 0.95 in the mixture and 1 where only one is asked for
    """
    asked = [r for r in records if "response" not in r and "response_ids" not in r]
    done: dict[str, dict[str, Any]] = {}
    if asked:
        with _alone(path):
            done = _read(path)
            if missing := [r for r in asked if _key(r) not in done]:
                done |= _generate(missing, target, path, max_tokens, temperatures)
    return [r if "response" in r or "response_ids" in r else done[_key(r)] for r in records]


def _generate(
    records: Sequence[dict[str, Any]], target: str, path: Path, max_tokens: int, mixture: Sequence[float]
) -> dict[str, dict[str, Any]]:
    llm = LLM(target, draft="ngram")
    if llm.tokenizer is None:
        raise ValueError(f"{target} has no tokenizer; give data with answers")
    inner, found = llm.engine.target.model.tokenizer, {}
    for at in range(0, len(records), BATCH):
        part = records[at : at + BATCH]
        temperatures = [mixture[(at + i) % len(mixture)] for i in range(len(part))]
        params = [
            SamplingParams(
                temperature=t, top_p=0.95 if t and len(mixture) > 1 else 1.0, max_tokens=max_tokens, seed=at + i
            )
            for i, t in enumerate(temperatures)
        ]
        outputs = llm.generate([prompt_ids(inner, r["prompt"]) for r in part], params)
        with path.open("a", encoding="utf-8") as file:
            for record, temperature, output in zip(part, temperatures, outputs, strict=True):
                ids = list(output.outputs[0].token_ids)
                answered = {**record, "temperature": temperature, "response_ids": ids}
                found[_key(record)] = answered
                file.write(json.dumps(answered) + "\n")
    return found


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing the same answers; ValueError where one is at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{path} is being written by another process; wait for it, or give another --out"
            ) from None
        yield


def _key(record: dict[str, Any]) -> str:
    return str(record["prompt"])


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {_key(record): record for record in read_written(path)}


def read_written(path: Path) -> list[dict[str, Any]]:
    """The records of a file that a run appends to; none where there is no file.

    A last line that an interrupt cut short is cut off the file; any other that is no record is an error.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) or line.endswith(b"\n"):
                raise ValueError(f"line {number} of {path} is no JSON record: {error}") from None
            os.truncate(path, path.stat().st_size - len(line))
    return records
