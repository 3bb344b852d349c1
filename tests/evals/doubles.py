"""Broken engines on purpose, which the evals must catch; and the comparison they are put into."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from evals.compare import Comparison
from evals.equality import Judge
from evals.load import Job, System
from evals.runs import Run
from evals.stages import WatchedEngine
from evals.systems import EngineSystem, encode
from evals.workloads import load_named
from specdec import LLM
from specdec.scheduler import Emitted


class DropsToken(WatchedEngine):
    """Forgets to report the third token of every output."""

    def step(self) -> list[Emitted]:
        """A step, one token short now and then."""
        return [
            replace(gain, token_ids=gain.token_ids[1:])
            if gain.request.num_output_tokens - len(gain.token_ids) < 3 <= gain.request.num_output_tokens
            else gain
            for gain in super().step()
        ]


class Sleeps(WatchedEngine):
    """Rests four times as long as it works, so that it is five times slower on any machine."""

    def step(self) -> list[Emitted]:
        """A slow step."""
        began = time.perf_counter()
        gains = super().step()
        time.sleep(4 * (time.perf_counter() - began))
        return gains


def jobs_for(llm: LLM, count: int, max_tokens: int = 8, temperature: float = 0.0) -> list[Job]:
    """Short jobs in the toy's own tokens."""
    prompts = load_named("chat")[:count]
    return [Job(p, encode(llm, p)[:24], max_tokens, temperature, seed) for seed, p in enumerate(prompts)]


def compare(llm: LLM, systems: Sequence[System], jobs: Sequence[Job], repeats: int = 3) -> list[Run]:
    """Measure at concurrency 2."""
    judge = Judge(llm.model_path, "float64")
    comparison = Comparison(systems, judge, _decoder(llm), save=lambda run: None)
    with tqdm(disable=True) as bar:
        comparison.measure("chat", jobs, 2, range(repeats), bar)
    return comparison.runs


def _decoder(llm: LLM) -> Callable[[Sequence[int]], str]:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode


def system(engine: WatchedEngine, label: str) -> EngineSystem:
    """A plain policy on any engine, under another name."""
    made = EngineSystem(engine, label, 0)
    assert made.label == label
    return made
