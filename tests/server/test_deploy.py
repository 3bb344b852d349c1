"""What is shipped for operators fits the server: queries name real metrics, the scrape path exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.server.scripted import scripted_engine
from tests.server.support import run, serving

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def queries() -> list[str]:
    """Every query of the dashboard."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def exposed() -> str:
    """/metrics after some speculating."""

    async def use() -> str:
        async with serving(scripted_engine(num_drafts=3)) as client:
            await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 12})
            return (await client.get("/metrics")).text

    text: str = run(use())
    return text


def test_every_query_of_the_dashboard_names_real_metrics_and_labels(exposed: str) -> None:
    for query in queries():
        names = re.findall(r"specdec:[a-z0-9_]+", query)
        assert names, query
        for name in names:
            assert re.search(rf"^{name}(\{{| )", exposed, re.M), name
        for label in re.findall(r"by \(([a-z_]+)\)", query):
            assert re.search(rf"^{names[0]}\{{[^}}]*{label}=", exposed, re.M), (query, label)


def test_every_counter_of_speculation_is_on_the_dashboard(exposed: str) -> None:
    on_board = " ".join(queries())
    for name in set(re.findall(r"^(specdec:spec_decode_[a-z_]+_total)", exposed, re.M)):
        assert name in on_board


def test_the_scrape_example_and_the_container_use_the_servers_paths() -> None:
    assert "metrics_path: /metrics" in (DEPLOY / "prometheus.yml").read_text()
    assert "/health" in (DEPLOY / "Dockerfile").read_text()
