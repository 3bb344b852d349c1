"""What is shipped for operators fits the server: queries name real metrics, the scrape path exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.server.flags import make_parser
from tests.server.scripted import scripted_engine
from tests.server.support import live_server, run, serving

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


def test_the_scrape_example_uses_the_servers_path() -> None:
    assert "metrics_path: /metrics" in (DEPLOY / "prometheus.yml").read_text()


def test_the_container_names_real_flags_paths_and_its_entry_point() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    flags = {action.dest.upper() for action in make_parser()._actions}
    named = set(re.findall(r"SPECDEC_([A-Z_]+)", text))
    assert named and named <= flags, named - flags
    assert set(re.findall(r"--([a-z-]+) ", text.split("specdec --", 1)[1].split("(")[0])) <= {"target"}
    (entry,) = re.findall(r'ENTRYPOINT \["([^"]+)"\]', text)
    assert f"{entry} = " in (DEPLOY.parent / "pyproject.toml").read_text()


def test_the_health_check_of_the_container_follows_the_port() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (code,) = re.findall(r'^  ("import .*")\]$', text, re.M)
    words = [sys.executable, "-c", json.loads(code)]
    with live_server(scripted_engine()) as url:
        environ = {**os.environ, "SPECDEC_PORT": url.rpartition(":")[2]}
        assert subprocess.run(words, env=environ).returncode == 0
    assert subprocess.run(words, env=environ, stderr=subprocess.DEVNULL).returncode != 0
