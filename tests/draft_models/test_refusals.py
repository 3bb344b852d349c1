"""What the commands of draft_models cannot do is refused before a model is loaded, with the flag, value and limit."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from draft_models import answers, prompts, train


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(prompts, "LLM", load)
    monkeypatch.setattr(train, "load_target", load)


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        *((f"--{name.replace('_', '-')}", "0", "at least 1") for name in train.WHOLE),
        ("--muon-rate", "nan", "at least 0"),
        ("--adam-rate", "-1.0", "at least 0"),
        ("--every", "inf", "at least 0"),
        ("--minutes", "0.0", "above 0"),
        ("--minutes", "nan", "above 0"),
        ("--heldout-percent", "100.0", "below 100"),
    ],
)
def test_numbers_of_train(
    flag: str, value: str, limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--data", "none", "--out", str(tmp_path), f"{flag}={value}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"{flag} is {value}; it must be" in said and limit in said


def test_prompts_go_on_in_their_own_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"prompt": "a"}\n')
    for path in (tmp_path, foreign):
        with pytest.raises(SystemExit) as ended:
            prompts.main(["--out", str(path)])
        assert ended.value.code == 2 and f"--out is {path}, which cannot be continued" in capsys.readouterr().err


def test_prompts_go_on_where_the_file_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "asked.jsonl", list[int]()
    record = {"number": 9, "prompt": "nine", "response_ids": [1]}
    path.write_text(json.dumps(record) + "\n")

    def ask(llm: Any, tokenizer: Any, numbers: Any, seed: int, longest: int) -> list[prompts.Asked]:
        asked.extend(numbers)
        return []

    monkeypatch.setattr(prompts, "ask", ask)
    monkeypatch.setattr(prompts, "answer", lambda *arguments: iter(()))
    llm: Any = None
    prompts.run(llm, None, path, num=300, seed=0, longest=(8, 8), until=float("inf"))
    assert asked == list(range(10, 300))


def test_answers_are_written_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "answers.jsonl"
    path.parent.mkdir()
    monkeypatch.setattr(
        answers, "_generate", lambda records, *rest: {r["prompt"]: r | {"response": "b"} for r in records}
    )
    with (path.parent / "answers.jsonl.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"answers.jsonl is being written by another process"):
            answers.complete([{"prompt": "a"}], "none", path)
        answered = [{"prompt": "a", "response": "b"}]
        assert answers.complete(answered, "none", path) == answered  # nothing to write
    assert answers.complete([{"prompt": "a"}], "none", path) == answered
