"""evals.draft_cost: every clock and concurrency gets its line, and the three kinds of step are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import draft_cost, results
from tests.drafts.eagle_toys import safeai_config, tensors, write


def test_a_toy_head_is_measured(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"feature_layer_ids": [0, 2, 3], "feature_convention": "entry"}
    head = write(tmp_path / "head", safeai_config(specdec=own), tensors())
    out = tmp_path / "out.jsonl"
    words = ["--target", toy, "--draft", head, "--dtype", "float32", "--prompt-tokens", "9", "--tokens", "6"]
    assert draft_cost.main([*words, "--rounds", "1", "--concurrency", "2", "-k", "2", "--out", str(out)]) == 0
    found = list(results.read(out))
    assert [(m["concurrency"], m["clock"]) for m in found] == [(2, "wall"), (2, "processor")]
    assert all(m["step"] > 0 and m["token"] > 0 and m["keeping"] > 0 for m in found if m["clock"] == "wall")
    assert "draft token" in capsys.readouterr().out
