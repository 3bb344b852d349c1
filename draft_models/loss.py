"""Loss: the divergence of a draft from the target's own law.

It knows the target's end (norm, head rows, embedding) and one unrolled step. The law is restricted to the
draft vocabulary and renormalised, and tokens outside it are left out, as EAGLE-3 does (Li et al. 2025,
arXiv 2503.01840). It does not know how drafts compute what their output heads read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.head import Rows

CHUNK = 128  # rows whose scores are worked on at once: they stay in a core's cache


@dataclass(frozen=True, slots=True)
class TargetEnd:
    """What turns the target's last entry feature into its law over the draft vocabulary, all frozen.

    embedding   [V, H]    norm_weight [H]    head [Vd, H]    draft_ids [Vd] ascending target ids
    """

    embedding: Tensor
    norm_weight: Tensor
    norm_eps: float
    head: Tensor
    draft_ids: Tensor

    @torch.no_grad()
    def scores(self, last: Tensor) -> Tensor:
        """Scores [N, Vd] of pre-norm last features [N, H]."""
        normed = F.rms_norm(last.float(), (last.shape[-1],), self.norm_weight.float(), self.norm_eps)
        return F.linear(normed.to(self.head.dtype), self.head)

    def known(self, ids: Tensor) -> Tensor:
        """Whether ids are in the draft vocabulary."""
        return torch.isin(ids, self.draft_ids)


class Law:
    """The target's law of the N tokens that a batch's rows predict at step 0, worked out when it is first asked for.

    last   [N, H]   pre-norm last features, of the places before those tokens
    """

    def __init__(self, end: TargetEnd, last: Tensor) -> None:
        self._end, self._last = end, last

    @cached_property
    def whole(self) -> Tensor:
        """[N, Vd], summing to one over the draft vocabulary, in the target's dtype."""
        parts = [self._end.scores(last) for last in self._last.split(CHUNK)]
        return torch.cat([part.float().softmax(dim=-1).to(part.dtype) for part in parts])


@dataclass(frozen=True)
class StepView:
    """One unrolled step of a batch, flat over its N valid rows.

    hidden     [N, H] what the draft's output head reads
    head       [Vd, H] the output head
    target     law of the rows of step 0
    rows       [N] which of them these are
    tokens     [N] what the text says, as target ids
    known      [N] whether that token is in the draft vocabulary
    valid      [B, R] where the N rows stand
    """

    hidden: Tensor
    head: Tensor
    target: Law
    rows: Tensor
    tokens: Tensor
    known: Tensor
    valid: Tensor

    @cached_property
    def scores(self) -> Tensor:
        """[N, Vd] of the draft."""
        return F.linear(self.hidden, self.head)

    @property
    def law(self) -> Tensor:
        """[N, Vd] of the target."""
        return self.target.whole[self.rows].float()


def target_law(rows: Rows, end: TargetEnd, last: Tensor) -> Law:
    """The target's law of the token each valid row predicts at step 0.

    last   [B, T, H]   the entry feature of the final norm
    """
    gathered = last.gather(1, rows.index(1)[..., None].expand(-1, -1, last.shape[-1]))
    return Law(end, gathered[rows.valid(0)])


def view(rows: Rows, end: TargetEnd, step: int, hidden: Tensor, head: Tensor, law: Law) -> StepView:
    """Step `step` of a batch from what its valid rows give the output head, [N, H], and the law of step 0."""
    valid, inside = rows.valid(step), rows.valid(0)
    places = torch.full(inside.shape, -1, device=inside.device)
    places[inside] = torch.arange(int(inside.sum()), device=inside.device)
    tokens = rows.ids.gather(1, rows.index(2 + step))[valid]
    return StepView(hidden, head, law, places.roll(-step, dims=1)[valid], tokens, end.known(tokens), valid)


def divergence(steps: Sequence[StepView], decay: float) -> Tensor:
    """Sum over steps of decay**step times the mean cross-entropy of the draft under the target's law; [].

    The mean is over rows whose token can be proposed; a step without any adds nothing.
    """
    first = steps[0]
    hidden = torch.cat([view.hidden[view.known] for view in steps])
    rows = torch.cat([view.rows[view.known] for view in steps])
    counts = [int(view.known.sum()) for view in steps]
    weights = [torch.full((n,), decay**step / max(n, 1), device=hidden.device) for step, n in enumerate(counts)]
    return cross_entropy(hidden, first.head, first.target.whole, rows, torch.cat(weights))


def cross_entropy(hidden: Tensor, head: Tensor, law: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum [] of the cross-entropies of an output head on hidden [N, H] under rows [N] of a law [M, Vd].

    head [Vd, H]; weights [N]. Products are taken in the law's dtype, softmax and sums in float32.
    """
    loss: Tensor = _CrossEntropy.apply(hidden, head, law, rows, weights)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Output head and cross-entropy in one: scores and their gradient never stand in memory in float32.

    Gradients are worked out on the way forward, where the scores are at hand.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, law: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        read, head = hidden.detach().to(law.dtype), weight.detach().to(law.dtype)
        slopes = torch.empty(len(read), len(head), dtype=law.dtype, device=law.device)
        total = torch.zeros((), device=law.device)
        for at in range(0, len(read), CHUNK):
            part = slice(at, at + CHUNK)
            logs = F.linear(read[part], head).float().log_softmax(dim=-1)
            wanted = law[rows[part]]
            total -= torch.linalg.vecdot(logs, wanted.float()) @ weights[part]
            slopes[part] = logs.exp_().sub_(wanted).mul_(weights[part, None])
        slope_head = slopes.T @ read if weight.requires_grad else None
        ctx.save_for_backward(slopes @ head, slope_head)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        first = by_hidden.to(ctx.dtypes[0]) * slopes[0]
        second = None if by_weight is None else by_weight.to(ctx.dtypes[1]) * slopes[0]
        return first, second, None, None, None
