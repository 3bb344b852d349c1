"""The verdict on exactness: right engines pass with random parameters, one that accepts what it should not fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evals import exactness, results
from evals.parameter_sets import Pool, draw, strategy
from evals.random_parameters import logprobs_off_by
from specdec.batch import Row
from specdec.logprobs import TokenLogprob

Command = Callable[..., int]


@pytest.fixture
def command(toy: str, tmp_path: Path) -> Command:
    """The command on a toy that drafts for itself."""

    def run(*arguments: str) -> int:
        own = ["--target", toy, "--draft", toy, "--dtype", "float64", "--num-prompts", "2"]
        return exactness.main([*own, *arguments, "--out", str(tmp_path / "results.jsonl")])

    return run


@pytest.mark.slow
def test_random_parameters_change_nothing(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--random-parameters", "10", "--max-tokens", "8", "--cases", "good,wrong") == 0
    lines = list(results.read(tmp_path / "results.jsonl"))
    assert [line["case"] for line in lines] == [
        "good",
        "good, adaptive",
        "wrong",
        "wrong, adaptive",
        "good, few blocks",
    ]
    assert float(lines[0]["acceptance"]) == 1.0 and {line["verdict"] for line in lines} == {"equal"}
    assert "EXACT: 5 of 5 cases" in capsys.readouterr().out


def test_an_engine_that_accepts_wrong_drafts_is_caught(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lax(row: Row, chosen: list[int]) -> tuple[int, ...]:
        return (*row.draft_token_ids, chosen[-1])

    monkeypatch.setattr(sys.modules["specdec.sampling.verify"], "_agreed", lax)
    assert command("--random-parameters", "6", "--max-tokens", "6", "--cases", "wrong") == 1
    assert "NOT EXACT: 0 of 2 cases" in capsys.readouterr().out


def test_sets_are_of_every_kind_and_not_near_copies() -> None:
    source = strategy(Pool(tuple(range(40)), ("ab", "c ", " d")), 16)
    sets = draw(source, 40, 0, lambda own: own["max_tokens"] > 1)
    assert len(sets) == 40 == len({own["seed"] for own in sets})
    names = {name for own in sets for name in own}
    assert names >= {"top_p", "min_p", "bad_words", "structured_outputs", "stop", "prompt_logprobs", "ignore_eos"}
    assert min(own["temperature"] for own in sets) < 2e-6 and max(own["temperature"] for own in sets) > 1.2
    assert draw(source, 40, 0, lambda own: own["max_tokens"] > 1) == sets


def test_reports_of_other_tokens_are_infinitely_far() -> None:
    one = [None, TokenLogprob(3, -0.5, 1, ((3, -0.5), (4, -2.0)))]
    near = [None, TokenLogprob(3, -0.5001, 1, ((3, -0.5001), (4, -2.0)))]
    assert logprobs_off_by(one, one) == 0 == logprobs_off_by(None, None)
    assert 0 < logprobs_off_by(one, near) < 1e-3
    for other in (None, one[:1], [None, None], [None, TokenLogprob(4, -0.5, 1, one[1].top if one[1] else ())]):
        assert logprobs_off_by(one, other) == float("inf")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_sets_at_every_length_in_float64(command: Command) -> None:
    assert command("--random-parameters", "200", "--max-tokens", "20", "--every-length") == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_sets_on_the_real_model(tmp_path: Path) -> None:
    """`python -m evals.exactness --random-parameters 200 --max-tokens 20`."""
    arguments = ["--random-parameters", "200", "--max-tokens", "20", "--out", str(tmp_path / "results.jsonl")]
    assert exactness.main(arguments) == 0
