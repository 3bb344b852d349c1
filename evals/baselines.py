"""Baselines: what transformers itself does with the same model, prompts and precision, in the same run.

It knows `generate` in three forms: plain, assisted by a second model, and with prompt look-up. They
serve one request at a time and are greedy here, since their sampled text has other noise than ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from evals.load import Job, Outcome

NAMES = ("transformers", "assisted", "lookup")
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


def load(
    names: Sequence[str], target: Path, draft: Path | None, dtype: torch.dtype, eos_token_ids: frozenset[int]
) -> list[TransformersSystem]:
    """The baselines asked for, over one copy of the target."""
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype).eval()
    options: dict[str, dict[str, Any]] = {"transformers": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if "assisted" in names:
        if draft is None:
            raise ValueError("baseline assisted needs --draft PATH")
        options["assisted"] = {"assistant_model": AutoModelForCausalLM.from_pretrained(str(draft), dtype=dtype).eval()}
    labels = {"transformers": "transformers", "assisted": "transformers assisted", "lookup": "transformers lookup"}
    return [TransformersSystem(labels[name], model, eos_token_ids, options[name]) for name in names]
