"""Workloads: the sets are whole and unique, and other people's files are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evals.workloads import NAMES, Prompt, load_file, load_named, take


def test_named_sets_are_whole() -> None:
    sets = {name: load_named(name) for name in NAMES}
    assert all(10 <= len(prompts) <= 16 for prompts in sets.values())
    texts = [prompt.text for prompts in sets.values() for prompt in prompts]
    assert len(set(texts)) == len(texts)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="poems"):
        load_named("poems")


RECORDS = [
    ({"category": "qa", "turns": ["one", "two"]}, Prompt("one", "qa")),
    ({"task_id": "HumanEval/0", "prompt": "def f():"}, Prompt("def f():", "prompts", is_raw=True)),
    ({"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}, Prompt("b", "prompts")),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, Prompt("u", "prompts")),
    ({"prompt": "plain"}, Prompt("plain", "prompts")),
]


@pytest.mark.parametrize("as_lines", [True, False])
def test_every_form_is_read(tmp_path: Path, as_lines: bool) -> None:
    records = [record for record, _ in RECORDS]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) if as_lines else json.dumps(records))
    assert load_file(path) == [prompt for _, prompt in RECORDS]


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match="record 2"):
        load_file(path)


def test_repeated_and_missing_prompts_are_refused() -> None:
    """Negative control: the same prompt twice would be served from a cache."""
    twice = [Prompt("a", "x"), Prompt("b", "x"), Prompt("a", "x")]
    with pytest.raises(ValueError, match="prompt 2 repeats prompt 0"):
        take(twice, None)
    assert take(twice, 2) == twice[:2]
    with pytest.raises(ValueError, match="num_prompts is 4"):
        take(twice, 4)
