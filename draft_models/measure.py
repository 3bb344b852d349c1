"""Measure: how far a draft agrees with texts of its target, greedy or under the shared noise.

It knows drafts as recipes and texts as samples; the arithmetic of acceptance is in `acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draft_models.acceptance import Tally, run_lengths, walk
from draft_models.batches import group, pad, predicting_rows
from draft_models.features import Sample
from draft_models.loss import StepView


@torch.no_grad()
def agreements(recipe: Any, samples: Sequence[Sample], k: int, noise_seed: int | None = None) -> list[Tensor]:
    """Per sample, a table [rows, k]: is the draft for k' places on right, given that those before were.

    noise_seed   None: both choose their likeliest token. Else: the text is taken as drawn at temperature 1
                 with Gumbel noise, the noise is drawn given the text, and the draft sees the same noise.
    """
    numbered = {id(sample): i for i, sample in enumerate(samples)}
    tables: list[Tensor] = [torch.zeros(predicting_rows(s), k, dtype=torch.bool) for s in samples]
    for batch in group(samples, 1024, 0):
        rows = pad(batch, recipe.draft_ids.device)
        for step, view in enumerate(recipe.views(rows, k)):
            right = torch.zeros(view.valid.shape, dtype=torch.bool)
            right[view.valid.cpu()] = _right(recipe, view, None if noise_seed is None else noise_seed + step).cpu()
            for row, sample in enumerate(batch):
                table = tables[numbered[id(sample)]]
                table[:, step] = right[row, : len(table)]
    return tables


def _right(recipe: Any, view: StepView, noise_seed: int | None) -> Tensor:
    scores = view.scores
    if noise_seed is not None:
        scores = scores.log_softmax(-1) + noise_given_text(view, recipe.draft_ids, noise_seed)
    is_right: Tensor = recipe.draft_ids[scores.argmax(-1)] == view.tokens
    return is_right


def noise_given_text(view: StepView, draft_ids: Tensor, seed: int) -> Tensor:
    """Gumbel noise [N, Vd] as it was, given that the text's token had the highest sum of log p and noise.

    The maximum is Gumbel whatever won; the others are Gumbels truncated below it (Maddison, Tarlow, Minka
    2014, arXiv 1411.0030, section 3). Tokens outside the draft vocabulary are left out of the race, which
    lowers the maximum by -log of the mass they leave (about 0.04); where the text's token is one of them nothing
    can agree, and the noise does not matter.
    """
    generator = torch.Generator(device=view.scores.device).manual_seed(seed)
    log_law = view.law.clamp_min(1e-38).log()
    free = torch.rand(log_law.shape, generator=generator, device=log_law.device).clamp(1e-20, 1 - 1e-7)
    top = -(-torch.rand(len(log_law), 1, generator=generator, device=log_law.device).clamp(1e-20, 1 - 1e-7).log()).log()
    sums = -torch.logaddexp(-top.expand_as(log_law), -(log_law - (-free.log()).log()))
    won = draft_ids[None] == view.tokens[:, None]
    noise: Tensor = torch.where(won, top, sums) - log_law
    return noise


def tally(tables: Sequence[Tensor], k: int) -> Tally:
    """Walk every text as an engine that drafts k at each step."""
    return Tally.total(walk(run_lengths(table[:, :k]).tolist(), k) for table in tables)


def chunks(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Consecutive groups of samples."""
    for at in range(0, len(samples), size):
        yield samples[at : at + size]
