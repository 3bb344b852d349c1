"""The Triton kernels, interpreted on a CPU: a process of their own runs tests/kernels/on_device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p.name for p in (ROOT / "tests/kernels/on_device").glob("test_triton_*.py"))


def run(names: list[str], *arguments: str) -> str:
    """Run these files' tests in the interpreter; return what pytest said."""
    files = [f"tests/kernels/on_device/{name}" for name in names]
    command = [sys.executable, "-m", "pytest", *files, "-q", "--no-shares", *arguments]
    environment = {**os.environ, "SPECDEC_KERNELS": "interpret", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_agree_with_their_twins() -> None:
    assert re.search(r"\d+ passed", said := run(FILES)) and "skipped" not in said, said[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_kernels_agree_with_their_twins_on_the_whole_grid(name: str) -> None:
    """pytest -m slow tests/kernels/test_interpreted.py"""
    run([name], "-m", "slow or not slow", "--timeout", "1800")
