"""Results: what was measured, on what, by which command, as JSON lines that any run may append to.

It knows provenance (commit, versions, machine, command, seed, time) and one file format. It does
not know what the numbers mean, and it keeps no host name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import specdec

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DIRECTORY = Path("results")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where numbers come from.

    commit    of the checkout; ends in "+" where files differ from it, None outside a checkout
    machine   cpu, cores, memory in GiB, gpu, torch's threads
    started   UTC, ISO 8601; one a run of a command
    """

    commit: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    command: str
    seed: int
    started: str


def describe(module: str, arguments: Sequence[str], seed: int) -> Provenance:
    """Look at the checkout, the packages and the machine."""
    return Provenance(
        commit=_commit(),
        versions=_versions(),
        machine=_machine(),
        command=" ".join(["python -m", module, *arguments]),
        seed=seed,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "specdec": specdec.__version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class ResultFile:
    """One JSON-lines file of one command; every line stands alone and is on disk when `write` returns."""

    def __init__(self, path: Path, provenance: Provenance) -> None:
        self.path = path
        self.provenance = provenance
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            with path.open("ab") as file:  # an interrupted writer left half a line; keep ours apart from it
                file.write(b"\n")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record.

        kind     which question it answers, such as "speedup.run"
        values   what was measured
        """
        line = json.dumps({"kind": kind, **asdict(self.provenance), **values}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def default_path(module: str) -> Path:
    """results/<command>-<UTC time>.jsonl under the working directory."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return DEFAULT_DIRECTORY / f"{module.removeprefix('evals.')}-{stamp}.jsonl"


def opened(module: str, argv: Sequence[str], out: Path | None, seed: int = 0) -> ResultFile:
    """The file of one command: where `out` says, else a new one under results/."""
    return ResultFile(out or default_path(module), describe(module, argv, seed))


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A command line that says what its module says first, and takes --out."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n")[0])
    made.add_argument("--out", type=Path, help="JSON lines are appended here; default: a new file under results/")
    return made


def matching(path: Path | None, kind: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of an earlier run that have these values, for --resume; none without a file."""
    if path is None:
        return []
    records = (record for record in read(path) if record["kind"] == kind)
    return [record for record in records if all(record.get(name) == value for name, value in values.items())]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of a file; a last line cut short by an interrupt is skipped with a warning."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}:{number}: not a whole JSON line; skipped", file=sys.stderr)
