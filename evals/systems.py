"""Systems: the ways of decoding that are compared, built so that they differ in nothing else.

It knows how to load a target with each proposer and how large the cache must be for a workload.
It does not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.grid import ADAPTIVE
from evals.load import Job, Outcome, closed_loop
from evals.stages import StepShape, WatchedEngine
from evals.workloads import Prompt
from specdec import LLM, SpeculativeConfig, SpeculativeParams
from specdec.control.adaptive import AdaptiveLength
from specdec.controller import Controller, FixedLength
from specdec.proposers import LONGEST_LOOKUP
from specdec.proposers.base import MostExpected
from specdec.proposers.hybrid import HybridProposer

METHODS = ("plain", "ngram", "suffix", "hybrid", "auto", "draft")
"""Names of `draft=`, but for "plain", no draft at all, and "draft", the one that is given by path."""
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all systems of a run share.

    draft      the second model, or the head over features, of method "draft"; None where it is not asked for
    ks         draft lengths tried
    adaptive   the adaptive controller is tried as well
    traces     where it writes its decisions, a file a method; None: nowhere
    """

    target: str
    draft: str | None
    dtype: str
    ks: tuple[int, ...]
    max_concurrency: int
    max_tokens: int
    adaptive: bool = False
    traces: Path | None = None

    def trace(self, method: str) -> Path | None:
        """Where the controller of a method writes its decisions."""
        return None if self.traces is None or not self.adaptive else self.traces / f"{method}.jsonl"


class EngineSystem:
    """Our engine under one policy: a proposer and a draft length that does not change, or a controller of it.

    k            None: the engine's own controller chooses
    controller   None: the engine's own
    """

    max_concurrency: int | None = None

    def __init__(self, engine: WatchedEngine, method: str, k: int | None, controller: Controller | None = None) -> None:
        self.engine = engine
        self.method = method
        self.k = k
        self.label = f"{method} {ADAPTIVE}" if k is None else method if k == 0 else f"{method} k={k}"
        self._controller = engine.controller if controller is None else controller
        self._params = SpeculativeParams(enabled=k != 0, num_speculative_tokens=k)

    def run(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """Serve the jobs in a closed loop."""
        self.engine.steps.clear()
        self.engine.controller = self.engine.heard(self._controller)
        proposer = self.engine.proposer
        if isinstance(proposer, HybridProposer):  # fixed lengths go with the policy that needs no controller
            proposer.policy = self._controller if isinstance(self._controller, AdaptiveLength) else MostExpected()
        return closed_loop(self.engine, jobs, concurrency, self._params)

    def work(self) -> tuple[dict[str, float], int]:
        """Seconds of every stage and steps, of all policies on this engine."""
        return dict(self.engine.clock.total), self.engine.num_steps

    def steps(self) -> list[StepShape]:
        """Of the last run."""
        return list(self.engine.steps)


def load(setup: Setup, method: str, longest_prompt: int) -> LLM:
    """Load the target with one proposer.

    Prefix caching is off, so that a repeated prompt is computed again. The cache holds the highest
    concurrency whole: what is compared is decoding, not preemption.
    """
    most = max((*setup.ks, *(LONGEST_LOOKUP.values() if setup.adaptive else ())), default=0)
    blocks_each = -(-(longest_prompt + setup.max_tokens + most + 1) // BLOCK_SIZE) + 1
    if method == "plain":
        draft, speculative = None, SpeculativeConfig(method="none")
    else:
        draft = setup.draft if method == "draft" else method
        trace = setup.trace(method)
        speculative = SpeculativeConfig(
            num_speculative_tokens=None if setup.adaptive else most,  # fixed lengths bring their own
            adaptive=setup.adaptive,
            trace=None if trace is None else str(trace),
        )
    return LLM(
        setup.target,
        draft,
        speculative=speculative,
        dtype=setup.dtype,
        block_size=BLOCK_SIZE,
        num_kv_blocks=blocks_each * setup.max_concurrency,
        max_num_seqs=setup.max_concurrency,
        max_num_batched_tokens=max(512, setup.max_concurrency * (most + 1)),
        enable_prefix_caching=False,
    )


def engine_systems(llms: dict[str, LLM], ks: Sequence[int], *, adaptive: bool = False) -> list[EngineSystem]:
    """Every policy; plain first, since the others are measured against it."""
    systems: list[EngineSystem] = []
    for method, llm in llms.items():
        watched = WatchedEngine(llm.engine)
        fixed = FixedLength(max(ks, default=0), llm.engine.proposer.max_draft_position)
        systems += [EngineSystem(watched, method, k, fixed) for k in ([0] if method == "plain" else ks)]
        if method != "plain" and adaptive:
            systems.append(EngineSystem(watched, method, None))
    return systems


def encode(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    """A prompt's token ids: the chat template around a message where the model has one."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError(f"{llm.model_path} has no tokenizer; evals start from texts")
    if prompt.is_raw or not tokenizer.has_chat_template:
        return tuple(tokenizer.encode(prompt.text))
    return tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
