"""Workloads: named sets of prompts, and the file formats other people keep theirs in.

It knows texts and categories. It does not tokenise, apply templates or run anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chat", "code", "summarise", "translate", "extract", "math", "creative")
_DIRECTORY = Path(__file__).resolve().parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    category   the workload, or what its file says
    is_raw     True: text to be continued as it stands; False: a user's message
    """

    text: str
    category: str
    is_raw: bool = False


def load_named(name: str) -> list[Prompt]:
    """The prompts of one of the workloads written for this project."""
    if name not in NAMES:
        raise ValueError(f"workload is {name!r}; it must be one of {', '.join(NAMES)}, or use --prompts FILE")
    texts: list[str] = json.loads((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return [Prompt(text, name) for text in texts]


def load_file(path: Path) -> list[Prompt]:
    """Read prompts from JSON lines or a JSON array.

    A record is one of: {"turns": [...]} (Spec-Bench; the first turn is used), {"task_id", "prompt"}
    (HumanEval; continued as it stands), {"conversations": [{"from", "value"}]} (ShareGPT; the first
    human turn), {"messages": [{"role", "content"}]} (the first user turn), {"prompt": ...} (plain).
    """
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        records = json.loads(text)
    else:
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [_prompt(record, f"{path.name}, record {number}") for number, record in enumerate(records, start=1)]


def _prompt(record: Mapping[str, Any], where: str) -> Prompt:
    category = str(record.get("category", "prompts"))
    if "turns" in record:
        return Prompt(record["turns"][0], category)
    if "conversations" in record:
        return Prompt(_first(record["conversations"], "from", ("human", "user"), "value", where), category)
    if "messages" in record:
        return Prompt(_first(record["messages"], "role", ("user",), "content", where), category)
    if "prompt" in record:
        return Prompt(record["prompt"], category, is_raw="task_id" in record)
    raise ValueError(f"{where} has none of the keys turns, conversations, messages, prompt")


def _first(turns: Iterable[Mapping[str, str]], role: str, roles: Sequence[str], key: str, where: str) -> str:
    for turn in turns:
        if turn[role] in roles:
            return turn[key]
    raise ValueError(f"{where} has no turn by {' or '.join(roles)}")


def take(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """The first `count` prompts; None: all. Too few, or a repeated one, is an error.

    A repeated prompt would be served from caches and flatter whoever has one.
    """
    if count is not None and count > len(prompts):
        raise ValueError(f"num_prompts is {count}; the workload has {len(prompts)} prompts, and none is used twice")
    chosen = list(prompts[:count])
    seen: dict[str, int] = {}
    for index, prompt in enumerate(chosen):
        if prompt.text in seen:
            raise ValueError(f"prompt {index} repeats prompt {seen[prompt.text]}; prompts must be unique")
        seen[prompt.text] = index
    return chosen
