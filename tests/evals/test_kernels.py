"""The kernel sweep without a GPU: the model's arithmetic, refusals, and the compile table's shape."""

from dataclasses import replace
from pathlib import Path

import pytest

from evals import kernel_table, kernels, roofline
from evals.roofline import CARDS, SHAPES, Case, Grid


def test_verification_of_five_tokens_reads_the_cache_once() -> None:
    """128 KiB a token in all of Llama-3.1-8B is 4 KiB a layer; the rest is queries, outputs and partial sums."""
    decode, verify = (roofline.OPS["verify_attention"](Case(SHAPES["Llama-3.1-8B"], 8, 8192, k)) for k in (0, 4))
    cache = 8 * 8192 * 4096
    assert cache < decode.bytes < verify.bytes < 1.1 * cache
    assert decode.floor(CARDS["H100"]) == decode.bytes / 3.35e12


def test_a_floor_is_never_above_what_is_predicted_and_rows_that_do_not_fit_are_left_out() -> None:
    grid = Grid(list(CARDS), list(SHAPES), [1, 256], [512, 131072], [0, 8])
    rows = list(roofline.rows(list(roofline.OPS), grid))
    assert rows and all(row.cost.floor(row.card) <= row.cost.predicted(row.card) for row in rows)
    assert len([r for r in rows if r.op == "accept"]) == 4 * 3 * 2 * 2, "it does not depend on the context"
    assert not [r for r in rows if r.op == "verify_attention" and r.case.batch == 256 and r.case.context > 512]
    assert {row.op for row in rows} == set(roofline.OPS) and {row.card.name for row in rows} == set(CARDS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "--cards", "H1"], "card is 'H1'; known are A100"),
        (["--model", "--ops", "gemm"], "op is 'gemm'; known are"),
        (["--model", "--batches", "0"], "batches and contexts must be at least 1"),
        (["--compile-only", "--ops", "gemm"], "op is 'gemm'; known are"),
    ],
)
def test_what_is_not_known_is_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(arguments) == 2 and sentence in capsys.readouterr().err


def test_running_without_a_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert kernels.main(["--run", "--out", f"{tmp_path}/k.jsonl"]) == 2
    assert "--run needs a CUDA or HIP device" in capsys.readouterr().err


def test_the_model_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--model", "--cards", "H200", "--shapes", "SmolLM2-135M", "--batches", "1"]) == 0
    said = capsys.readouterr().out
    assert "verify_attention" in said and "H200" in said and "H100" not in said


def test_an_op_whose_tests_are_red_is_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=0: "a card")
    monkeypatch.setattr("evals.kernel_runs.is_green", lambda op: False)
    assert kernels.main(["--run", "--ops", "accept", "--out", f"{tmp_path}/k.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "accept: its tests fail on this machine" in said and "nothing was measured" in said


def test_a_line_is_bad_where_it_cannot_be_launched_or_a_default_spills() -> None:
    numbers = {"fits": (128, 0, 65536, 1), "spills": (255, 8, 0, 1), "is too large": (128, 0, 65537, 1)}
    lines = {name: kernel_table.Line(name, "gfx942", True, found) for name, found in numbers.items()}
    tried = {name: replace(line, is_default=False) for name, line in lines.items()}
    assert [line.is_bad for line in lines.values()] == [False, True, True]
    assert [line.is_bad for line in tried.values()] == [False, False, True]
    assert replace(lines["fits"], numbers=None).is_bad and replace(tried["fits"], numbers=None).is_bad
    said = kernel_table.summary([*lines.values(), *tried.values()])
    assert said.startswith("3 defaults compiled, 1 spill, 2 cannot be used; 3 of the search space compiled, 1 spill, 1")


def test_the_readme_gets_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- modelled: begin -->\nold\n<!-- modelled: end -->\nafter\n")
    command = ["--model", "--ops", "write_kv", "--cards", "H200", "--batches", "1", "--readme", str(readme)]
    assert kernels.main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "write_kv  H200" in text and f"python -m evals.kernels {' '.join(command[:-2])}`" in text
    readme.write_text("nothing")
    assert kernels.main(command) == 2 and "needs one part between" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compile_table_counts_what_spills(capsys: pytest.CaptureFixture[str]) -> None:
    """pytest -m slow tests/evals/test_kernels.py"""
    assert kernels.main(["--compile-only", "--ops", "write_kv", "--match", "d64 bf16"]) == 0
    assert "6 defaults compiled, 0 spill, 0 cannot be used; 0 of the search space" in capsys.readouterr().out
