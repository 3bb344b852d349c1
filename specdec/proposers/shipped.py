"""Shipped drafts: whether one came with this package that fits a target.

It knows directories by the target's name; whether tokenizers agree is checked when the draft is loaded.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
ROOTS = (_PACKAGE / "drafts", _PACKAGE.parent / "draft_models")
"""Where drafts lie in an installation and in a checkout; one directory a target, with a config.json."""


def shipped_draft(target: str, roots: tuple[Path, ...] = ROOTS) -> Path | None:
    """The draft for a target named by alias, hub id or directory; None where none ships."""
    name = target.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((root / name for root in roots if name and (root / name / "config.json").is_file()), None)
