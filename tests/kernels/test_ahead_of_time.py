"""Kernels compile for GPUs that are not here, and none of the defaults spills."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.kernels import dispatch
from specdec.kernels.ahead_of_time import TARGETS, compile_case

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(dispatch.mode() == "interpret", reason="kernels are interpreted in this process")


@pytest.mark.parametrize("target", TARGETS)
def test_a_writer_of_fp8_compiles_without_spills(target: str) -> None:
    from specdec.kernels.write_kv.configurations import all_cases

    case = next(case for case in all_cases() if case.name == "write_kv d128 bf16 to fp8")
    report = compile_case(case, target)
    assert report.spills == 0 and 0 < report.registers <= 255 and report.binary_bytes > 1000


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_kernel_that_spills_is_seen(target: str) -> None:
    """Negative control: half a thousand numbers a thread fit no register file."""
    from specdec.kernels.accept.configurations import all_cases

    case = next(case for case in all_cases() if case.name == "accept.normalise fp32")
    crowded = replace(case, constexprs={**case.constexprs, "TILE": 16384}, num_warps=1)
    assert compile_case(crowded, target).spills > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_default_spills_at_any_width_or_dtype_and_a_sweep_tries_only_what_runs() -> None:
    """pytest -m slow tests/kernels/test_ahead_of_time.py: an hour of one core, minutes where Triton's cache is warm."""
    command = [sys.executable, "-m", "evals.kernels", "--compile-only", "--space", "--jobs", str(os.cpu_count() or 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
