"""Engines for tests: built once for a set of options, checked for leaks after every use."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

import specdec
from specdec.batch import Batch, Drafts, Plan, Verdict
from specdec.llm import LLM
from specdec.request import Request


@functools.lru_cache(maxsize=12)
def _llm(target: str, draft: str | None, k: int | None, options: tuple[tuple[str, Any], ...]) -> LLM:
    speculative = specdec.SpeculativeConfig(num_speculative_tokens=k, adaptive=False)
    return LLM(target, draft, speculative=speculative, **dict(options))


def llm(target: str, draft: str | None = None, k: int | None = None, **options: Any) -> LLM:
    """A cached LLM with a clean prefix cache; toys run in float64."""
    options.setdefault("dtype", "float64")
    options.setdefault("num_kv_blocks", 256)
    made = _llm(target, draft, k, tuple(sorted(options.items())))
    made.engine.scheduler.pool.clear_cache()
    return made


def assert_clean(made: LLM) -> None:
    """Nothing runs, waits or is held."""
    scheduler = made.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks


def ids(made: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """Output ids of the prompts, with the leak check."""
    params.setdefault("temperature", 0)
    outputs = made.generate(prompts, specdec.SamplingParams(**params), progress=False)
    assert_clean(made)
    return [choice.token_ids for output in outputs for choice in output.outputs]


class Oracle:
    """Proposes what it is told to: the right continuation, or always something else."""

    name = "oracle"
    max_draft_position: int | None = None

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], *, wrong: bool = False, token: int | None = None
    ) -> None:
        self.answers = answers
        self.wrong = wrong
        self.token = token
        self.seen: list[Verdict] = []

    def start(self, request: Request) -> None: ...
    def stop(self, request: Request) -> None: ...

    def propose(self, plan: Plan) -> Drafts:
        return Drafts.of((self._offer(row.request, row.max_drafts) for row in plan), self.name)

    def _offer(self, request: Request, most: int) -> tuple[int, ...]:
        if self.token is not None:
            return (self.token,) * most
        answer = self.answers[tuple(request.token_ids[: request.num_prompt_tokens])]
        right = answer[request.num_output_tokens :][:most]
        return tuple((t + 1) % 256 for t in right) if self.wrong else tuple(right)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor | None) -> None:
        self.seen.append(verdict)


@contextmanager
def proposing(made: LLM, proposer: Any, k: int) -> Iterator[LLM]:
    """The same engine with another proposer and draft length."""
    engine = made.engine
    kept = engine.proposer, engine.controller.num_speculative_tokens, engine.controller.max_draft_position
    engine.proposer = proposer
    engine.controller.num_speculative_tokens, engine.controller.max_draft_position = k, None
    try:
        yield made
    finally:
        engine.proposer, engine.controller.num_speculative_tokens, engine.controller.max_draft_position = kept
