"""Metrics: counters and histograms for Prometheus, each formula beside its number.

It knows steps, requests and time; it knows no HTTP. A fault in here is logged and goes no further.

    acceptance rate         = spec_decode_num_accepted_tokens / spec_decode_num_draft_tokens
    mean acceptance length  = 1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts, of steps with drafts
    hit rate of prefixes    = prefix_cache_hits / prefix_cache_queries, in tokens
"""

from __future__ import annotations

import functools
import logging
from collections import Counter as Counts
from collections.abc import Callable
from typing import ParamSpec

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

from specdec.async_engine import StepReport
from specdec.engine import Engine
from specdec.tallies import Tally

logger = logging.getLogger("specdec")
P = ParamSpec("P")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FINISH_REASONS = ("stop", "length", "abort", "error")


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """Counting must never break what is counted."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("a metric could not be counted; requests are not affected")

    return guarded


class Metrics:
    """The numbers of one engine, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._seen: Counts[str] = Counts()
        self._add_speculation()
        self._add_cache_and_queues()
        self._add_requests()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"specdec:{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"specdec:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...] = _SECONDS) -> Tally:
        tally = Tally(f"specdec:{name}", text, bounds)
        self.registry.register(tally)
        return tally

    def _add_speculation(self) -> None:
        self.num_drafts = self._counter("spec_decode_num_drafts", "Rows that carried drafts")
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts that were judged")
        self.num_accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafts that were judged right")
        self.num_accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in the run, from 0",
            ("position",),
        )
        self.num_drafted_by = self._counter(
            "spec_decode_num_draft_tokens_by_proposer", "Drafts that were judged, by who proposed them", ("proposer",)
        )
        self.num_accepted_by = self._counter(
            "spec_decode_num_accepted_tokens_by_proposer", "Drafts that were judged right, by proposer", ("proposer",)
        )
        self.num_steps = self._counter("spec_decode_num_steps", "Steps, counted by an adaptive controller")
        self.num_zero_steps = self._counter("spec_decode_num_zero_steps", "Those without any draft")
        self.predicted_ratio = self._gauge("spec_decode_predicted_step_ratio", "Predicted over real seconds of a step")
        self.draft_length = self._histogram("spec_decode_draft_length", "Drafts of a row that decodes", _LENGTHS)

    def _add_cache_and_queues(self) -> None:
        self.num_running = self._gauge("num_requests_running", "Requests that take part in steps")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests that wait for a place")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of the blocks held by requests, 0 to 1")
        self.num_preemptions = self._counter("num_preemptions", "Requests sent back to wait for want of blocks")
        self.num_queried = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.num_hits = self._counter("prefix_cache_hits", "Prompt tokens found there")
        ProcessCollector(namespace="specdec", registry=self.registry)
        self._device = torch.device(getattr(self._engine.target.model, "device", "cpu"))
        if self._device.type == "cuda":
            self.memory_used = self._gauge("device_memory_used_bytes", "Memory of the device in use, by anyone")
            self.utilization = self._gauge("device_utilization_perc", "Share of time the device computed, 0 to 1")

    def _add_requests(self) -> None:
        self.num_prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, cached ones included")
        self.num_output_tokens = self._counter("generation_tokens", "Tokens emitted")
        self.num_finished = self._counter("request_success", "Requests that ended, by reason", ("finished_reason",))
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between steps that emitted for a request")
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token")
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step")
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens of a step", _SIZES)
        self.step_rows = self._histogram("iteration_rows", "Rows of a step", _SIZES)
        for reason in FINISH_REASONS:
            self.num_finished.labels(reason)

    # ------------------------------------------------------------------ counting

    @harmless
    def count_step(self, report: StepReport) -> None:
        """One step: its size, and what its drafts were worth."""
        self.step_rows.observe(report.num_rows)
        self.step_tokens.observe(report.num_tokens)
        self.num_prompt_tokens.inc(report.num_prompt_tokens)
        self.num_output_tokens.inc(sum(len(gain.token_ids) for gain in report.gains))
        drafted = [gain for gain in report.gains if gain.num_drafted]
        self.num_drafts.inc(len(drafted))
        self.num_draft_tokens.inc(sum(gain.num_drafted for gain in drafted))
        self.num_accepted_tokens.inc(sum(gain.num_accepted for gain in drafted))
        places = Counts(place for gain in drafted for place in range(gain.num_accepted))
        for place, count in places.items():
            self.num_accepted_per_pos.labels(place).inc(count)
        for source in {gain.source for gain in drafted}:
            own = [gain for gain in drafted if gain.source == source]
            self.num_drafted_by.labels(source).inc(sum(gain.num_drafted for gain in own))
            self.num_accepted_by.labels(source).inc(sum(gain.num_accepted for gain in own))
        for gain in report.gains:
            self.draft_length.observe(gain.num_drafted)

    @harmless
    def count_first_token(self, queue_seconds: float, seconds: float) -> None:
        """A choice's first token came `seconds` after arrival."""
        self.queue_time.observe(queue_seconds)
        self.first_token.observe(seconds)

    @harmless
    def count_gap(self, seconds: float) -> None:
        """Time since the choice's last token."""
        self.inter_token.observe(seconds)

    @harmless
    def count_end(self, reason: str, seconds: float) -> None:
        """A choice is over."""
        self.num_finished.labels(reason).inc()
        self.latency.observe(seconds)

    # ------------------------------------------------------------------ showing

    @harmless
    def _look(self) -> None:
        """Take what the engine counts itself; lengths are read between or within steps, both are true."""
        scheduler, pool = self._engine.scheduler, self._engine.scheduler.pool
        self.num_running.set(len(scheduler.running))
        self.num_waiting.set(len(scheduler.waiting))
        self.kv_usage.set(pool.usage)
        totals = self._engine.controller.totals
        if totals is not None:
            self._catch_up(self.num_steps, "steps", totals.num_steps)
            self._catch_up(self.num_zero_steps, "zero steps", totals.num_zero_steps)
            self.predicted_ratio.set(totals.ratio)
        self._catch_up(self.num_preemptions, "preemptions", scheduler.num_preemptions)
        self._catch_up(self.num_queried, "queried", pool.num_queried_tokens)
        self._catch_up(self.num_hits, "hits", pool.num_hit_tokens)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.memory_used.set(total - free)
            self.utilization.set(torch.cuda.utilization(self._device) / 100)

    def _catch_up(self, counter: Counter, name: str, total: int) -> None:
        counter.inc(total - self._seen[name])
        self._seen[name] = total

    def text(self) -> bytes:
        """The exposition format, as scrapers read it."""
        self._look()
        return generate_latest(self.registry)
