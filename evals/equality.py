"""Equality: whether a system said what plain decoding said, and whether a fork is one floating point allows.

It knows token ids and the reference model's scores. It does not know how the tokens were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from evals.load import Job
from specdec.engine import derive_seed
from specdec.kernels.accept import perturbed

FLOAT32_GAP = 2e-4
MAX_FORKS_PER_TOKEN = 1e-4


@dataclass(frozen=True, slots=True)
class Fork:
    """The first place where an output left the reference.

    gap         how far below the reference's best score the worse of the two tokens lies, in float32;
                None where one output simply ended
    tolerance   what rounding in the run's dtype can move
    """

    job: int
    position: int
    gap: float | None
    tolerance: float

    @property
    def is_allowed(self) -> bool:
        """True where rounding alone can have made the difference."""
        return self.gap is not None and self.gap <= self.tolerance


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two outputs differ; None when they are equal.

    >>> first_difference([1, 2, 3], [1, 2, 4])
    2
    >>> first_difference([1, 2, 3], [1, 2])
    2
    """
    for position, (one, two) in enumerate(zip(reference, other)):
        if one != two:
            return position
    return None if len(reference) == len(other) else min(len(reference), len(other))


class Judge:
    """Compares outputs; loads the reference model in float32 only when something forked.

    dtype   of the run, as in "bfloat16"
    """

    def __init__(self, model_path: Path, dtype: str) -> None:
        self.model_path = model_path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._model: Any = None

    def forks(
        self, jobs: Sequence[Job], references: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
    ) -> list[Fork]:
        """Every output that left its reference."""
        found = []
        for index, (job, reference, other) in enumerate(zip(jobs, references, others, strict=True)):
            position = first_difference(reference, other)
            if position is not None:
                found.append(self._fork(index, job, position, reference, other))
        return found

    def _fork(self, index: int, job: Job, position: int, reference: Sequence[int], other: Sequence[int]) -> Fork:
        if position >= min(len(reference), len(other)):
            return Fork(index, position, None, 0.0)
        logits = self.logits([*job.token_ids, *reference[:position]])
        seed = torch.tensor([derive_seed(job.seed, 0)])
        temperature = torch.tensor([job.temperature], dtype=logits.dtype)
        scores = perturbed(logits[None], seed, torch.tensor([position]), temperature)[0]
        worst = min(float(scores[reference[position]]), float(scores[other[position]]))
        tolerance = self.tolerance(float(logits.abs().max()), job.temperature)
        return Fork(index, position, float(scores.max()) - worst, tolerance)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The reference model's scores behind these tokens, [V]."""
        if self._model is None:
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            self._model = AutoModelForCausalLM.from_pretrained(str(self.model_path), dtype=dtype).eval()
        logits: torch.Tensor = self._model(torch.tensor([token_ids]), logits_to_keep=1).logits[0, 0]
        return logits

    def tolerance(self, largest: float, temperature: float) -> float:
        """float64: none. float32: 2e-4. Below: two steps of the dtype at the largest logit, over the temperature."""
        if self.dtype == torch.float64:
            return 0.0
        if self.dtype == torch.float32:
            return FLOAT32_GAP
        step = torch.finfo(self.dtype).eps * largest
        return 2 * step / (temperature if temperature > 1e-5 else 1.0)


def is_equal(forks: Sequence[Fork], num_tokens: int, dtype: str) -> bool:
    """The verdict on a run: every fork is allowed, and in float32 and above they are rare.

    One allowed fork is granted to a run too short to hold a rate of 1 in 10,000 tokens.
    """
    if any(not fork.is_allowed for fork in forks):
        return False
    is_exact = dtype in ("float32", "float64")
    return not is_exact or len(forks) <= max(1, num_tokens * MAX_FORKS_PER_TOKEN)
