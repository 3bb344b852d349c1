"""Provenance: what a checkpoint was made from, written beside it; it knows versions, hashes and arguments."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draft_models.checkpoint import WEIGHTS
from draft_models.corpus import file_hash

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
    made = out / "provenance.json.new"
    made.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    made.replace(out / "provenance.json")


def origin(folder: Path) -> dict[str, Any]:
    """What a run that starts from a checkpoint says of it: hash, commit and the answer tokens it had seen in all."""
    path = folder / "provenance.json"
    made = json.loads(path.read_text()) if path.is_file() else {}
    earlier = made.get("started_from") or {}
    rows = made["rows"] + earlier.get("rows", 0) if "rows" in made else None
    return {"sha256": file_hash(folder / WEIGHTS), "commit": made.get("commit"), "rows": rows}


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
