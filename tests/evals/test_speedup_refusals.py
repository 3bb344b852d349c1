"""What evals.speedup cannot measure is refused before a model is loaded, with the flag, its value and the limit."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from evals import speedup


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(speedup, "load", load)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-prompts 0", "--num-prompts: it is 0; it must be at least 1"),
        ("--max-tokens -3", "--max-tokens: it is -3; it must be at least 1"),
        ("--repeats 0", "--repeats: it is 0; it must be at least 1"),
        ("--minutes 0", "--minutes: it is 0; it must be finite and above 0"),
        ("--minutes nan", "--minutes: it is nan; it must be finite and above 0"),
        ("--minutes inf", "--minutes: it is inf; it must be finite and above 0"),
        ("--minutes 1 --repeats 2", "--repeats is 2 and --minutes is 1; give one of them"),
        ("--k ,", "--k is ; all of it must be at least 1"),
        ("--grid --num-prompts 1 --concurrency 32", "--num-prompts is 1; --grid at --concurrency 32 needs at least 32"),
    ],
)
def test_numbers_out_of_bounds(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        speedup.main(flags.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_paths_of_the_wrong_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for flags, said in (
        (["--adaptive", "--traces", str(file)], "a file; it must be a directory"),
        (["--adaptive", "--traces", str(file / "below")], "cannot be made"),
        (["--out", str(tmp_path)], "a directory; it must be a file"),
    ):
        with pytest.raises(SystemExit) as ended:
            speedup.main(flags)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_files_without_what_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, foreign = tmp_path / "empty.jsonl", tmp_path / "foreign.jsonl"
    empty.touch()
    foreign.write_text('{"a": 1}\n[2]\n')
    for flags, said in (
        (["--resume", str(tmp_path / "none")], "which cannot be read"),
        (["--resume", str(foreign)], "which holds no run of evals.speedup"),
        (["--prompts", str(empty)], "which holds no prompt; it needs at least one"),
    ):
        assert speedup.main(flags) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "flag"),
    [
        ("serving", "--num-requests"), ("batching", "--num-jobs"), ("simulate", "--requests"), ("twins", "--seeds"),
        ("exactness", "--num-prompts"), ("overhead", "--steps"), ("record", "--max-tokens"), ("profile", "--steps"),
        ("startup", "--repeats"), ("structured", "--max-tokens"), ("soak", "--minutes"), ("agreement", "--num-prompts"),
        ("lookup", "--store-tokens"), ("draft_cost", "--rounds"), ("http_overhead", "--streams"),
    ],
)  # fmt: skip
def test_sister_commands_refuse_nothing_to_do(module: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"evals.{module}").main([flag, "0"])
    assert ended.value.code == 2 and f"{flag}: it is 0; it must be" in capsys.readouterr().err
