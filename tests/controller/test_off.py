"""Claims about zero: the step is the plain step, it costs nothing, and drafting comes back from it whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from evals.sim_run import SOURCE
from specdec.batch import Drafts, Plan, Row, StepSeconds, Verdict
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.controller import Controller, FixedLength
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.proposers.draft_model import DraftModelProposer
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from tests.engines import ids, llm

K = 4
PROMPTS = [[65 + i, 66, 67, 68 + i, 70] for i in range(3)]


def costs_too_much(proposer: DraftModelProposer) -> AdaptiveLength:
    """A controller that believes a draft pass to take a thousand seconds."""
    sources = Sources(costly=proposer.name, lag=proposer.lag)
    return AdaptiveLength(FixedLength(K, None), sources, ForwardCost(512), ForwardCost(512, {1: 1e3, 512: 1e3}))


@contextmanager
def controlled(made: LLM, controller: Any) -> Iterator[Engine]:
    """The same engine under another controller."""
    engine = made.engine
    kept = engine.controller
    engine.controller = controller
    try:
        yield engine
    finally:
        engine.controller = kept


class OpTrace(TorchDispatchMode):
    """The names and shapes of all operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(tuple(a.shape) for a in args if hasattr(a, "shape"))
        self.ops.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def trace(made: LLM, steps: int = 12) -> list[tuple[str, tuple[Any, ...]]]:
    """Operations of the first steps of three requests."""
    engine = made.engine
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [engine.make_request(f"t{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    with OpTrace() as seen:
        for _ in range(steps):
            engine.step()
    for request in requests:
        engine.abort(request.request_id)
    return seen.ops


def test_at_zero_the_operations_are_those_of_plain_decoding(toy: str) -> None:
    plain = trace(llm(toy))
    made = llm(toy, draft=toy, k=K)
    assert isinstance(made.engine.proposer, DraftModelProposer)
    with controlled(made, costs_too_much(made.engine.proposer)) as engine:
        assert trace(made) == plain
        assert engine.controller.totals.num_zero_steps == engine.controller.totals.num_steps == 12  # type: ignore[attr-defined]


def test_drafting_is_seen_in_the_operations(toy: str) -> None:
    """Negative control."""
    assert trace(llm(toy, draft=toy, k=K)) != trace(llm(toy))


def test_after_200_steps_at_zero_a_self_draft_is_always_right_again(toy: str) -> None:
    made = llm(toy, draft=toy, k=K)
    assert isinstance(made.engine.proposer, DraftModelProposer)
    params: dict[str, Any] = {"max_tokens": 235, "ignore_eos": True}
    plain = ids(llm(toy), PROMPTS, **params)
    with controlled(made, costs_too_much(made.engine.proposer)) as engine:
        requests = [
            engine.make_request(f"z{i}", prompt, SamplingParams(temperature=0, **params))
            for i, prompt in enumerate(PROMPTS)
        ]
        for request in requests:
            engine.add(request)
        for _ in range(201):
            engine.step()
        assert all(r.stats.num_draft_tokens == 0 for r in requests)
        assert all(made.engine.proposer.lag(r) > 200 for r in requests)
        engine.controller = FixedLength(K, None)
        while engine.has_work:
            engine.step()
    assert all(r.stats.num_draft_tokens > 20 and r.stats.acceptance_rate == 1.0 for r in requests)
    assert [r.output_token_ids for r in requests] == plain


class _Stage:
    """32 rows in mid-decode, stepped through a controller with nothing else around it."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        params = SamplingParams(max_tokens=1000)
        self.requests = [Request(str(i), [1] * 30, params, max_output_tokens=1000) for i in range(32)]
        for request in self.requests:
            request.num_computed_tokens = 29
        self.verdict = Verdict(((1,),) * 32, (False,) * 32)

    def steps(self, count: int) -> float:
        """Seconds of processor time a step spends in the controller's verbs."""
        spent = 0.0
        for _ in range(count):
            plan = Plan(tuple(Row(r, 29, 1) for r in self.requests))
            began = time.thread_time()
            self.controller.prepare(self.requests, [])
            drafts = sum(self.controller.budget(r) for r in self.requests)
            batch = self.controller.admit(plan, Drafts.empty(32))
            self.controller.observe(batch, self.verdict, StepSeconds(0.0, 0.05))
            spent += time.thread_time() - began
            assert drafts == 0
        return spent / count


def test_at_zero_a_step_of_32_rows_costs_at_most_20_microseconds_more() -> None:
    """Against the controller of fixed length 0; the least of several stretches, all bookkeeping included."""
    sources = Sources(costly=SOURCE)
    off = AdaptiveLength(FixedLength(K, None), sources, ForwardCost(512), ForwardCost(512, {1: 1e3, 512: 1e3}))
    adaptive, plain = _Stage(off), _Stage(FixedLength(0, None))
    adaptive.steps(64)
    extra = min(adaptive.steps(128) for _ in range(12)) - min(plain.steps(128) for _ in range(12))
    assert extra < 20e-6
    assert off.totals.num_zero_steps == off.totals.num_steps


@pytest.mark.parametrize("reload", [False, True])
def test_a_cold_draft_proposes_nothing_in_a_step_without_room(toy: str, reload: bool) -> None:
    """A step in which no row may draft runs no forward of the draft."""
    made = llm(toy, draft=toy, k=K)
    proposer = made.engine.proposer
    assert isinstance(proposer, DraftModelProposer)
    calls: list[int] = []
    forward = proposer.runner.forward
    proposer.runner.forward = lambda batch: (calls.append(1), forward(batch))[1]  # type: ignore[method-assign]
    try:
        with controlled(made, FixedLength(K if reload else 0, None)):
            ids(made, PROMPTS, max_tokens=10)
    finally:
        proposer.runner.forward = forward  # type: ignore[method-assign]
    assert bool(calls) == reload
