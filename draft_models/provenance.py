"""Provenance: what a checkpoint was made from, written beside it; it knows versions, hashes and arguments."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


def record(out: Path, **facts: Any) -> None:
    """Write provenance.json; paths in `facts` keep their last part, so that no machine is named."""
    value = {
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        **{name: _plain(fact) for name, fact in facts.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "provenance.json").write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def commit() -> str:
    """The checkout's commit, marked where the tree differs from it; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=here, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() if said.returncode == 0 else "unknown"


def _plain(fact: Any) -> Any:
    if isinstance(fact, Path):
        return fact.name
    if isinstance(fact, str):
        return Path(fact).name if fact.startswith(("/", "~", ".")) else fact
    if isinstance(fact, Mapping):
        return {str(name): _plain(value) for name, value in fact.items()}
    if isinstance(fact, (list, tuple)):
        return [_plain(value) for value in fact]
    return fact
