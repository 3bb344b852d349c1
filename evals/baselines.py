"""Baselines: what transformers itself does with the same model, prompts and precision, in the same run.

It knows `generate` in three forms: plain, assisted by a second model, and with prompt look-up, which
serve one request at a time; and `generate_batch`, its continuous batching. All are greedy here, since
their sampled text has other noise than ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from evals.load import Job, Outcome
from evals.stages import StepShape

NAMES = ("transformers", "assisted", "lookup", "batching")
BLOCK_SIZE = 16
STEP_TOKENS = 512
LOOKUP_TOKENS = 10
"""Draft length of prompt look-up, the one its documentation uses."""


class _Stamps:
    """A streamer that writes down when tokens came; the first call brings the prompt."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.has_prompt = False

    def put(self, token_ids: torch.Tensor) -> None:
        """Called by generate with every batch of new tokens."""
        if self.has_prompt:
            self.outcome.emissions.append((time.perf_counter(), token_ids.numel()))
        self.has_prompt = True

    def end(self) -> None:
        """Called by generate at the end."""


class TransformersSystem:
    """One form of `transformers.generate`."""

    max_concurrency: int | None = 1

    def __init__(self, label: str, model: Any, eos_token_ids: frozenset[int], options: dict[str, Any]) -> None:
        self.label = label
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)
        self.options = options

    def run(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """One request after the other."""
        return [self._generate(job) for job in jobs]

    @torch.inference_mode()
    def _generate(self, job: Job) -> Outcome:
        outcome = Outcome(time.perf_counter())
        prompt = torch.tensor([job.token_ids], device=self.model.device)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=job.max_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.eos_token_ids[0] if self.eos_token_ids else 0,
            streamer=_Stamps(outcome),
            **self.options,
        )
        outcome.token_ids = out[0, len(job.token_ids) :].tolist()
        return outcome

    def work(self) -> tuple[dict[str, float], int]:
        """generate does not say."""
        return {}, 0

    def steps(self) -> list[StepShape]:
        """It does not say."""
        return []


class BatchingSystem:
    """`generate_batch`: all jobs in one call, at most `concurrency` of them in a step."""

    label = "transformers batching"
    max_concurrency: int | None = None

    def __init__(self, model: Any, eos_token_ids: frozenset[int]) -> None:
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)

    def run(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """Every job is submitted at once, so the time to its first token includes its wait for a place."""
        most = max(job.max_tokens for job in jobs)
        blocks_each = -(-max(len(job.token_ids) + most for job in jobs) // BLOCK_SIZE) + 1
        began = time.perf_counter()
        made = self.model.generate_batch(
            [list(job.token_ids) for job in jobs],
            generation_config=GenerationConfig(
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=self.eos_token_ids or None,
                pad_token_id=self.eos_token_ids[0] if self.eos_token_ids else 0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_SIZE,
                num_blocks=blocks_each * concurrency,
                max_batch_tokens=STEP_TOKENS,
                max_requests_per_batch=concurrency,
                allow_block_sharing=False,
            ),
            record_timestamps=True,
            warmup=False,
        )
        names = sorted(made, key=lambda name: int(name.rpartition("_")[2]))  # they are numbered in our order
        if len(names) != len(jobs):
            raise RuntimeError(f"{self.label} answered {len(names)} of {len(jobs)} requests")
        return [self._outcome(began, made[name]) for name in names]

    def _outcome(self, began: float, output: Any) -> Outcome:
        if output.error is not None:
            raise RuntimeError(f"{self.label} failed: {output.error}")
        outcome = Outcome(began, token_ids=list(output.generated_tokens))
        outcome.emissions = [(moment, 1) for moment in output.timestamps]
        return outcome

    def work(self) -> tuple[dict[str, float], int]:
        """generate_batch does not say."""
        return {}, 0

    def steps(self) -> list[StepShape]:
        """It does not say."""
        return []


def load(
    names: Sequence[str], target: Path, draft: Path | None, dtype: torch.dtype, eos_token_ids: frozenset[int]
) -> list[TransformersSystem | BatchingSystem]:
    """The baselines asked for, over one copy of the target; batching changes its model, so it has its own."""
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype).eval()
    options: dict[str, dict[str, Any]] = {"transformers": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if "assisted" in names:
        if draft is None:
            raise ValueError("baseline assisted needs --draft PATH")
        options["assisted"] = {"assistant_model": AutoModelForCausalLM.from_pretrained(str(draft), dtype=dtype).eval()}
    labels = {"transformers": "transformers", "assisted": "transformers assisted", "lookup": "transformers lookup"}
    systems: list[TransformersSystem | BatchingSystem] = [
        TransformersSystem(labels[name], model, eos_token_ids, options[name]) for name in names if name in labels
    ]
    if "batching" in names:
        own = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype, attn_implementation="sdpa").eval()
        systems.append(BatchingSystem(own, eos_token_ids))
    return systems
