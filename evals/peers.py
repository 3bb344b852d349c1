"""Peers: any server that speaks OpenAI's protocol, as a system to be measured over HTTP.

It knows streaming completions and their usage report. It does not know what runs behind the URL, so
it sees texts and times, not token ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from evals.load import Job, Outcome
from evals.stages import StepShape

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is and what it calls its model.

    url   with or without the trailing /v1
    """

    url: str
    model: str
    api_key: str = "none"

    @property
    def base(self) -> str:
        """The URL down to /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


def connect(url: str, api_key: str = "none") -> Endpoint:
    """Ask the server for the name of its first model."""
    found = Endpoint(url, "", api_key)
    reply = httpx.get(f"{found.base}/models", headers=_headers(found), timeout=TIMEOUT).raise_for_status()
    return Endpoint(url, reply.json()["data"][0]["id"], api_key)


def _headers(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.api_key}"}


def _body(job: Job, model: str) -> tuple[str, dict[str, Any]]:
    common = {
        "model": model,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.prompt.is_raw:
        return "completions", common | {"prompt": job.prompt.text}
    return "chat/completions", common | {"messages": [{"role": "user", "content": job.prompt.text}]}


def stream(client: httpx.Client, endpoint: Endpoint, job: Job) -> Outcome:
    """Serve one job; an HTTP error is an outcome with finish_reason "error"."""
    path, body = _body(job, endpoint.model)
    outcome = Outcome(time.perf_counter())
    chunks: list[tuple[float, str]] = []
    num_tokens: int | None = None
    try:
        with client.stream("POST", f"{endpoint.base}/{path}", json=body, headers=_headers(endpoint)) as reply:
            reply.raise_for_status()
            for event in _events(reply):
                text, reason = _delta(event)
                if text:
                    chunks.append((time.perf_counter(), text))
                outcome.finish_reason = reason or outcome.finish_reason
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    except httpx.HTTPError as error:
        outcome.finish_reason = "error"
        outcome.error = str(error)
    outcome.text = "".join(text for _, text in chunks)
    outcome.emissions = _spread(chunks, len(chunks) if num_tokens is None else num_tokens)
    return outcome


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data:") and (payload := line[5:].strip()) != "[DONE]":
            event = json.loads(payload)
            if "error" in event:
                raise httpx.HTTPError(str(event["error"]))
            yield event


def _delta(event: dict[str, Any]) -> tuple[str, str | None]:
    for choice in event.get("choices", ()):
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        return text or "", choice.get("finish_reason")
    return "", None


def _spread(chunks: Sequence[tuple[float, str]], num_tokens: int) -> list[tuple[float, int]]:
    """Events with the reported tokens shared among them: one each, and what is left over by length of text.

    Only the sum is the server's word; the latencies use the times, not the shares.
    """
    if not chunks:
        return []
    whole = sum(len(text) for _, text in chunks)
    spare = max(num_tokens - len(chunks), 0)
    emissions = []
    given = seen = 0
    for moment, text in chunks:
        seen += len(text)
        due = spare * seen // whole
        emissions.append((moment, 1 + due - given))
        given = due
    return emissions


class PeerSystem:
    """A server under closed-loop load."""

    max_concurrency: int | None = None

    def __init__(self, label: str, endpoint: Endpoint) -> None:
        self.label = label
        self.endpoint = endpoint

    def run(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """Serve all jobs, one thread a place in flight."""
        limits = httpx.Limits(
            max_connections=concurrency, max_keepalive_connections=0
        )  # some close them between requests
        with httpx.Client(timeout=TIMEOUT, limits=limits) as client, ThreadPoolExecutor(concurrency) as pool:
            outcomes = list(pool.map(lambda job: stream(client, self.endpoint, job), jobs))
        failed = next((o for o in outcomes if o.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"{self.label} at {self.endpoint.url} failed: {failed.error}")
        return outcomes

    def work(self) -> tuple[dict[str, float], int]:
        """A server does not say."""
        return {}, 0

    def steps(self) -> list[StepShape]:
        """It does not say."""
        return []
