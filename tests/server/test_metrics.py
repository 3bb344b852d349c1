"""/metrics: every name of the design, numbers that add up, faults that stay here."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specdec.engine import Engine
from specdec.metrics import Metrics
from specdec.tallies import Tally
from tests.server.scripted import scripted_engine
from tests.server.support import run, serving

NAMES = [
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count"),
    *("request_queue_time_seconds_count", "request_success_total", "iteration_tokens_total_count"),
    *("iteration_rows_count", "spec_decode_draft_length_count", "specdec_process_resident_memory_bytes"),
]


def scrape(engine: Engine, *bodies: dict[str, Any]) -> dict[str, float]:
    """Serve some completions at once, then read the metrics; labels are part of the key."""

    async def use() -> str:
        async with serving(engine) as client:
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return (await client.get("/metrics")).text

    values = {}
    for family in text_string_to_metric_families(run(use())):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for key, value in sample.labels.items() if key != "le")
            values[sample.name.removeprefix("specdec:") + labels] = sample.value
    return values


def test_a_fresh_server_shows_every_name_and_no_nan() -> None:
    values = scrape(scripted_engine())
    for name in NAMES:
        assert any(key.startswith(name) for key in values), name
    counted = [value for key, value in values.items() if "_created" not in key and "process_" not in key]
    assert set(counted) == {0.0}


def test_tokens_and_ends_are_counted() -> None:
    body = {"prompt": "the ", "max_tokens": 5}
    values = scrape(scripted_engine(), body, body | {"n": 2, "stream": True}, body | {"stop": "i"})
    assert values["prompt_tokens_total"] == 16
    assert values["generation_tokens_total"] == 18
    assert values["request_success_total{length}"] == 3 and values["request_success_total{stop}"] == 1
    assert values["time_to_first_token_seconds_count"] == values["request_queue_time_seconds_count"] == 4
    assert values["inter_token_latency_seconds_count"] == 14
    assert values["e2e_request_latency_seconds_count"] == 4
    assert values["iteration_tokens_total_sum"] == 16 + 18 - 4
    assert values["num_requests_running"] == values["num_requests_waiting"] == values["kv_cache_usage_perc"] == 0


def test_a_draft_that_is_always_right_is_accepted_always() -> None:
    values = scrape(scripted_engine(num_drafts=4), {"prompt": "the ", "max_tokens": 11})
    assert values["spec_decode_num_drafts_total"] == 2
    assert values["spec_decode_num_draft_tokens_total"] == values["spec_decode_num_accepted_tokens_total"] == 8
    assert [values[f"spec_decode_num_accepted_tokens_per_pos_total{{{j}}}"] for j in range(4)] == [2] * 4
    assert values["spec_decode_num_draft_tokens_by_proposer_total{prophet}"] == 8
    assert values["spec_decode_num_accepted_tokens_by_proposer_total{prophet}"] == 8
    assert values["spec_decode_draft_length_count"] == 3 and values["spec_decode_draft_length_sum"] == 8


def test_a_draft_that_is_always_wrong_is_never_accepted() -> None:
    values = scrape(scripted_engine(num_drafts=4, wrong_every=1), {"prompt": "the ", "max_tokens": 11})
    assert values["spec_decode_num_draft_tokens_total"] > 0 == values["spec_decode_num_accepted_tokens_total"]


def test_prefix_hits_are_counted() -> None:
    body = {"prompt": "the quick brown fox jumps over the lazy dog. ", "max_tokens": 1}
    engine = scripted_engine()
    scrape(engine, body)
    values = scrape(engine, body)
    assert values["prefix_cache_queries_total"] == 90 and values["prefix_cache_hits_total"] == 32


def test_a_fault_in_a_metric_breaks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*args: Any) -> None:
        raise RuntimeError("no metric")

    monkeypatch.setattr(Metrics, "_catch_up", fault)
    monkeypatch.setattr("prometheus_client.Histogram.observe", fault)
    monkeypatch.setattr("prometheus_client.Counter.inc", fault)

    async def use() -> None:
        async with serving(scripted_engine(num_drafts=2)) as client:
            answer = await client.post("/v1/completions", json={"prompt": "the ", "max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == "quick"
            assert (await client.get("/metrics")).status_code == 200

    run(use())


def test_two_servers_count_apart() -> None:
    scrape(scripted_engine(), {"prompt": "the ", "max_tokens": 5})
    assert scrape(scripted_engine())["generation_tokens_total"] == 0


def test_a_tally_writes_what_a_histogram_of_prometheus_writes() -> None:
    """Edge values, values beyond all bounds, none at all: the same lines, less the moment of creation."""
    rng = random.Random(1)
    bounds = (0, 0.001, 0.25, 1, 2.5, 1000)
    for values in ([], list(bounds), [-1.0, 5e9, 0.25, 0.2500001], [rng.expovariate(1) for _ in range(1000)]):
        theirs, ours = CollectorRegistry(), CollectorRegistry()
        histogram = Histogram("specdec:some_seconds", "Some words", registry=theirs, buckets=bounds)
        tally = Tally("specdec:some_seconds", "Some words", bounds)
        ours.register(tally)
        for value in values:
            histogram.observe(value)
            tally.observe(value)
        lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
        assert generate_latest(ours).decode().splitlines() == lines
