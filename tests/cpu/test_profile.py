"""What the profile of the CPU path says, and how far quantised weights are from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evals import agreement, profile, results


def test_the_profile_of_attention(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attention.jsonl"
    options = ["--target", toy, "--out", str(out), "--steps", "2", "--quantization", "none"]
    assert profile.main([*options, "--attention", "--rows", "1,2", "--keys", "24", "--queries", "1,3"]) == 0
    _, *cases = results.read(out)
    assert [(case["rows"], case["queries"]) for case in cases] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(case["attention"] > 0 for case in cases) and cases[2]["read"] == 2 * cases[0]["read"] > 0
    assert "attention / read" in capsys.readouterr().out


def test_limits_of_the_machine_are_not_those_of_a_kernel_that_torch_lacks() -> None:
    slow = profile.Machine(2, 1e9, products_per_second=8.0, narrow_products=0.1, byte_products=0.2)
    fast = profile.Machine(2, 1e9, products_per_second=8.0, narrow_products=60.0, byte_products=90.0)
    kinds = [(False, False), (False, True), (True, False)]
    assert [slow.rate(in_bytes=b, is_narrow=n) for b, n in kinds] == [8.0, 8.0, 8.0]
    assert [fast.rate(in_bytes=b, is_narrow=n) for b, n in kinds] == [8.0, 60.0, 90.0]
    runs: list[None] = []
    profile.best_rate(1.0, lambda: runs.append(time.sleep(0.01)), patience=0.001)
    assert len(runs) == 1, "what takes long is not repeated"


def test_profile_and_agreement(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.jsonl"
    options = ["--target", toy, "--out", str(out), "--quantization", "int8-a8"]
    assert profile.main([*options, "--rows", "1,2", "--steps", "4", "--context", "20"]) == 0
    machine, *cases = results.read(out)
    assert machine["bytes_per_second"] > 0 and [case["rows"] for case in cases] == [1, 2]
    for case in cases:
        assert set(case["forward"]) == {"elementwise", "linears", "attention", "head"}
        assert sum(case["forward"].values()) > 0 and case["limit"] == max(case["memory"], case["arithmetic"]) > 0
    assert agreement.main([*options, "--num-prompts", "1", "--max-tokens", "4", "--at-least", "1.01"]) == 1
    plain, rounded = [r for r in results.read(out) if r["kind"] == "agreement.candidate"]
    assert 0 <= plain["kl_mean"] < rounded["kl_mean"] < 0.2 and rounded["top1_sure"] > 0.9
    assert "int8-a8" in capsys.readouterr().out
