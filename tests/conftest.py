"""Fixtures shared by all rooms: toy checkpoints, one of a kind a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toys import make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with a byte tokenizer and a chat template."""
    return make_toy(tmp_path_factory.mktemp("toys") / "llama")


@pytest.fixture(scope="session")
def toy_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another tiny random Llama of the same tokenizer: a draft that is nearly always wrong."""
    return make_toy(tmp_path_factory.mktemp("toys") / "draft", seed=1, num_hidden_layers=1)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An empty directory."""
    return tmp_path
