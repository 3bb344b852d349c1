"""Cost: the time of engine steps with and without a draft, and of a draft token, over the same prompts.

It times the engine from outside and its proposer's verb; it knows nothing of acceptance but what the engine counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import LLM, SamplingParams, SpeculativeConfig


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one request's decode step.

    step      the whole step
    propose   of it, drafting
    """

    k: int
    step: float
    propose: float


def measure(
    target: str, draft: Path, prompts: Sequence[list[int]], ks: Sequence[int], max_tokens: int = 48
) -> list[StepCost]:
    """Time steps at concurrency 1 with 0 drafts and with each of `ks`, engines taking turns prompt by prompt."""
    engines = {0: LLM(target, None, enable_prefix_caching=False)}
    for k in ks:
        config = SpeculativeConfig(num_speculative_tokens=k, adaptive=False)
        engines[k] = LLM(target, str(draft), speculative=config, enable_prefix_caching=False)
    watches = {k: _Watch(llm) for k, llm in engines.items()}
    for prompt in prompts:
        for watch in watches.values():
            watch.run(prompt, max_tokens)
    return [watch.cost(k) for k, watch in watches.items()]


class _Watch:
    """Times decode steps of one engine; the first step of a prompt, its prefill, is not counted."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.steps, self.proposing = llm, [0.0][:0], [0.0][:0]
        self._spent = 0.0
        engine: Any = llm.engine
        propose = engine.proposer.propose

        def timed(plan: Any) -> Any:
            began = time.perf_counter()
            try:
                return propose(plan)
            finally:
                self._spent = time.perf_counter() - began

        engine.proposer.propose = timed

    def run(self, prompt: list[int], max_tokens: int) -> None:
        engine: Any = self.llm.engine
        step, seen = engine.step, []

        def timed() -> Any:
            self._spent, began = 0.0, time.perf_counter()
            out = step()
            seen.append((time.perf_counter() - began, self._spent))
            return out

        engine.step = timed
        try:
            self.llm.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True), progress=False)
        finally:
            engine.step = step
        self.steps += [whole for whole, _ in seen[1:]]
        self.proposing += [spent for _, spent in seen[1:]]

    def cost(self, k: int) -> StepCost:
        """Medians: a shared machine has a long tail."""
        ordered, proposing = sorted(self.steps), sorted(self.proposing)
        return StepCost(k, ordered[len(ordered) // 2], proposing[len(proposing) // 2])


def best_k(costs: Sequence[StepCost], lengths: dict[int, float]) -> tuple[int, float]:
    """The measured k with the most emitted tokens a second, and its ratio to plain decoding.

    lengths   mean acceptance length by k; that of k = 0 is 1
    """
    plain = next(c.step for c in costs if c.k == 0)
    rates = {c.k: (lengths[c.k] if c.k else 1.0) / c.step for c in costs}
    best = max(rates, key=lambda k: rates[k])
    return best, rates[best] * plain
