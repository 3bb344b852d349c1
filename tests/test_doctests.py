"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for room in ("specdec", "evals", "draft_models")
    for p in (ROOT / room).rglob("*.py")
    if ">>>" in p.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
