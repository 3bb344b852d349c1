"""Native code: C++ kernels, compiled once for this machine with its own compiler and called through ctypes.

Knows sources, flags, the cache of built libraries and how to call a symbol. It does not know what the kernels compute:
each op's door decides when to call and falls back to its plain-PyTorch twin whenever `enabled()` is False.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from specdec.kernels import dispatch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}  # DType in vec.h

_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_num_disabled = 0


class BuildError(Exception):
    """The compiler is missing or refused the sources."""


def enabled() -> bool:
    """Whether ops should call native code: it was built, and neither the environment nor a test has switched it off."""
    return not _num_disabled and library() is not None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Make every op use its twin inside the block."""
    global _num_disabled
    _num_disabled += 1
    try:
        yield
    finally:
        _num_disabled -= 1


def has_tiles() -> bool:
    """Whether linear layers in bfloat16 shall run on the matrix units of x86 (AMX).

    That needs a processor, a compiler and a system that have them; SPECDEC_AMX=0 says no where they do.
    """
    chosen = os.environ.get("SPECDEC_AMX") or "1"
    if chosen not in ("0", "1"):
        raise ValueError(f"SPECDEC_AMX is {chosen!r}; it must be 0 or 1")
    return chosen == "1" and enabled() and bool(function("specdec_has_tiles", "", "i")())


def identity() -> str:
    """Name the code that runs: the sources' and the processor's fingerprint, and whether tiles are used."""
    loaded = library() if enabled() else None
    return "plain PyTorch" if loaded is None else f"{Path(loaded._name).name} {has_tiles()}"


@functools.cache
def function(name: str, arguments: str, result: str | None = None) -> Callable[..., Any]:
    """Return the symbol `name`; `arguments` has one letter each: p pointer, i int64, f float.

    >>> function("specdec_panel", "", "i")() % 8
    0
    """
    loaded = library()
    assert loaded is not None, "ask enabled() first"
    symbol: Callable[..., Any] = getattr(loaded, name)
    symbol.argtypes = [_TYPES[letter] for letter in arguments]  # type: ignore[attr-defined]
    symbol.restype = _TYPES[result] if result else None  # type: ignore[attr-defined]
    return symbol


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, building them if this machine has not yet.

    None where that is impossible, or where SPECDEC_KERNELS asks for something else; decided once a process.
    """
    if dispatch.mode() != "auto":
        return None
    try:
        return _build_and_load(openmp=True)
    except (BuildError, OSError):
        try:
            return _build_and_load(openmp=False)
        except (BuildError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            logger.warning("CPU kernels are not built, plain PyTorch is used instead (slower): %s", reason)
            return None


def cache_dir() -> Path:
    """Return where built libraries are kept: $SPECDEC_CACHE, else the user's cache directory."""
    if chosen := os.environ.get("SPECDEC_CACHE"):
        return Path(chosen) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "native"


def _build_and_load(openmp: bool) -> ctypes.CDLL:
    compiler = _compiler()
    flags = [*_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"]
    runtime = _openmp_runtime() if openmp else None
    if openmp and runtime is None:
        raise BuildError("no OpenMP runtime is loaded")
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    path = cache_dir() / f"kernels-{_fingerprint(compiler, flags, runtime)}.so"
    if not path.exists():
        _build(compiler, flags, sources, runtime, path)
    return ctypes.CDLL(str(path))


def _compiler() -> str:
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    raise BuildError("no C++ compiler was found; install g++ or set CXX")


def _openmp_runtime() -> str | None:
    """Return the file of the OpenMP runtime that torch has loaded: a second one would double the threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*lib[gi]?omp[^/\s]*\.so[^/\s]*)", maps)
    return found[1] if found else None


def _fingerprint(compiler: str, flags: list[str], runtime: str | None) -> str:
    digest = hashlib.sha256()
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(repr((flags, runtime, compiler, version, _cpu())).encode())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """Return the processor's model and features: `-march=native` means something else on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(compiler: str, flags: list[str], sources: list[Path], runtime: str | None, path: Path) -> None:
    """Compile every source at once, link beside the target, and rename: readers see a whole library or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        openmp = ["-fopenmp"] if runtime else []
        _run_all([[compiler, *flags, *openmp, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects)])
        linked = Path(folder) / path.name
        strict = ["-Wl,-z,defs"] if sys.platform == "linux" else []
        libraries = [runtime] if runtime else []
        _run_all([[compiler, "-shared", *strict, "-o", str(linked), *map(str, objects), *libraries, "-lm"]])
        os.replace(linked, path)


def _run_all(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors):
        if process.returncode:
            raise BuildError(next((line for line in error.splitlines() if "error" in line), error) or "it failed")
