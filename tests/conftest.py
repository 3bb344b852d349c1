"""Fixtures shared by all rooms, and the seconds each room may take.

The suite has eight minutes on two cores; a room that takes more than twice its share fails the run.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.toys import make_toy

# Seconds allotted to the tests below each folder; tests directly in tests/ are the main job's.
SHARES = {
    "main job": 150,
    "sampling": 80,
    "kernels": 80,
    "drafts": 40,
    "controller": 30,
    "server": 70,
    "evals": 15,
    "cpu": 15,
}
_seconds: dict[str, float] = defaultdict(float)


def _room(path: str) -> str:
    parts = tuple({"draft_models": "drafts"}.get(part, part) for part in Path(path).parts)
    return parts[1] if len(parts) > 2 and parts[1] in SHARES else "main job"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shares", action="store_true", help="do not fail a room that takes too long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Large grids run only when they are asked for by marker."""
    if config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[_room(report.nodeid.split("::")[0])] += report.duration


def over_budget(seconds: dict[str, float]) -> list[str]:
    """Rooms beyond twice their share."""
    return [room for room, spent in seconds.items() if spent > 2 * SHARES[room]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if over_budget(_seconds) and not session.config.getoption("--no-shares"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for room, share in SHARES.items():
        if room in _seconds:
            late = "   more than twice its share" if room in over_budget(_seconds) else ""
            terminalreporter.write_line(f"{room:10s} {_seconds[room]:6.1f} s of {share} s{late}")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with a byte tokenizer and a chat template."""
    return make_toy(tmp_path_factory.mktemp("toys") / "llama")


@pytest.fixture(scope="session")
def toy_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another tiny random Llama of the same tokenizer: a draft that is nearly always wrong."""
    return make_toy(tmp_path_factory.mktemp("toys") / "draft", seed=1, num_hidden_layers=1)
