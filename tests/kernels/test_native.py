"""Building native code: one runtime for threads, off when asked, and plain PyTorch where there is no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_oracles import needs_native, needs_tiles

from specdec.kernels import native

SCRIPT = """
import logging, torch
logging.basicConfig(level="WARNING", format="LOG %(message)s")
from specdec.kernels import native
from specdec.kernels.linear import linear, pack
for _ in range(2):
    print("native:", native.enabled())
weight = torch.eye(3)
print("works:", torch.equal(linear(weight, pack(weight)), weight))
"""


def run_python(environment: dict[str, str]) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_without_a_compiler_plain_pytorch_is_used_and_said_once(tmp_path: Path) -> None:
    output = run_python({"SPECDEC_CACHE": str(tmp_path), "CXX": "", "PATH": str(tmp_path)})
    assert output.count("native: False") == 2 and "works: True" in output
    assert output.count("LOG") == 1 and "no C++ compiler was found" in output


def test_a_compiler_that_fails_is_survived_and_said_once(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    output = run_python({"SPECDEC_CACHE": str(tmp_path), "CXX": str(broken)})
    assert output.count("native: False") == 2 and "works: True" in output
    assert output.count("LOG") == 1 and "out of order" in output
    assert not list((tmp_path / "native").glob("*")), "a failed build leaves nothing behind"


def test_the_environment_can_ask_for_plain_pytorch(tmp_path: Path) -> None:
    output = run_python({"SPECDEC_CACHE": str(tmp_path), "SPECDEC_KERNELS": "reference"})
    assert output.count("native: False") == 2 and "works: True" in output and "LOG" not in output
    assert not list(tmp_path.iterdir()), "nothing is built"


@needs_native
def test_native_code_can_be_switched_off() -> None:
    with native.disabled():
        assert not native.enabled()
        with native.disabled():
            assert not native.enabled()
        assert not native.enabled()
    assert native.enabled()


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "omp" in Path(line.split()[-1]).name and ".so" in line}
    assert len(runtimes) <= 1, runtimes


@needs_native
def test_the_library_is_named_after_what_it_was_built_from() -> None:
    built = native.library()
    assert built is not None and Path(built._name).parent == native.cache_dir()
    name = native._fingerprint("/bin/true", ["-O3"], None)
    assert name != native._fingerprint("/bin/true", ["-O2"], None)


@needs_tiles
def test_the_identity_tells_kernels_and_switches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured with one code is not taken for the speed of another."""
    with_tiles = native.identity()
    monkeypatch.setenv("SPECDEC_AMX", "0")
    without = native.identity()
    with native.disabled():
        assert len({with_tiles, without, native.identity()}) == 3


@pytest.mark.slow
def test_a_team_of_threads_never_sleeps_through_a_barrier() -> None:
    """pytest -m slow tests/kernels/test_native.py: a minute of barriers, a process that hangs is the failure.

    A barrier whose last arrival was stored too weakly lost a wake-up about once in minutes of decoding on two cores.
    """
    code = (
        "import time, torch\n"
        "from specdec.kernels.linear import linear, pack\n"
        "torch.set_num_threads(2)\n"
        "packed, x = pack(torch.randn(1536, 576)), torch.randn(1, 576)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end:\n"
        "    linear(x, packed)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
