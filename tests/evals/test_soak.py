"""The soak passes on the engine, and catches one that leaks a block and one that changes a token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from evals import results, soak
from evals.soak import Tally, expected, make_wishes, run_round
from evals.stages import WatchedEngine
from specdec import LLM
from specdec.scheduler import Emitted


def small(toy: str, num_blocks: int) -> LLM:
    return LLM(toy, None, dtype="float64", block_size=4, num_kv_blocks=num_blocks, max_num_batched_tokens=64)


class Leaks(WatchedEngine):
    """Takes a block in every step and gives none back."""

    def step(self) -> list[Emitted]:
        """A step and a leak."""
        gains = super().step()
        self.scheduler.pool.allocate(1)
        return gains


class Alters(WatchedEngine):
    """Writes another token than the target chose, once a request."""

    def step(self) -> list[Emitted]:
        """A step and a lie."""
        gains = super().step()
        for gain in gains:
            if gain.request.num_output_tokens == 2:
                gain.request.token_ids[-1] ^= 1
        return gains


@pytest.mark.parametrize(("double", "complaint"), [(Leaks, "step 1"), (Alters, "alone and plain it says")])
def test_a_broken_engine_is_caught(toy: str, double: type[WatchedEngine], complaint: str) -> None:
    engine = double(small(toy, 100).engine)
    wishes = make_wishes(random.Random(3), 250, 4)
    reference = small(toy, 100).engine
    tally = Tally()
    run_round(engine, wishes, [expected(reference, wish) for wish in wishes], tally, "test")
    assert tally.violations and complaint in tally.violations[0]


def test_the_engine_passes(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.jsonl"
    arguments = ["--target", toy, "--methods", "self", "--requests", "20", "--out", str(out)]
    assert soak.main(arguments) == 0
    last = list(results.read(out))[-1]
    assert last["num_finished"] + last["num_aborted"] == 20
    assert last["num_preemptions"] > 0 and last["num_accepted_tokens"] > 0
    assert "per finished request" in capsys.readouterr().out
