"""Loss: the divergence of a draft from the target's own law.

It knows the target's end (norm, head rows, embedding) and one unrolled step. The law is restricted to the
draft vocabulary and renormalised, and tokens outside it are left out, as EAGLE-3 does (Li et al. 2025,
arXiv 2503.01840). It does not know how drafts compute their scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.head import Rows


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
        normed = F.rms_norm(last, (last.shape[-1],), self.norm_weight, self.norm_eps)
        return F.linear(normed, self.head)

    def known(self, ids: Tensor) -> Tensor:
        """Whether ids are in the draft vocabulary."""
        return torch.isin(ids, self.draft_ids)


@dataclass(frozen=True, slots=True)
class StepView:
    """One unrolled step of a batch, flat over its N valid rows.

    scores    [N, Vd] of the draft
    law       [N, Vd] of the target, summing to one over the draft vocabulary
    tokens    [N] what the text says, as target ids
    known     [N] whether that token is in the draft vocabulary
    valid     [B, R] where the N rows stand
    """

    scores: Tensor
    law: Tensor
    tokens: Tensor
    known: Tensor
    valid: Tensor


def target_law(rows: Rows, end: TargetEnd, last: Tensor) -> Tensor:
    """The target's law [B, R, Vd] of the token each row predicts at step 0; zeros where a row is padding.

    last   [B, T, H]   the entry feature of the final norm
    """
    inside = rows.valid(0)
    gathered = last.gather(1, rows.index(1)[..., None].expand(-1, -1, last.shape[-1]))
    law = torch.zeros(*inside.shape, len(end.draft_ids), device=last.device)
    law[inside] = end.scores(gathered[inside]).softmax(dim=-1)
    return law


def view(rows: Rows, end: TargetEnd, step: int, scores: Tensor, law: Tensor) -> StepView:
    """Step `step` of a batch from flat scores [N, Vd] of its valid rows and the law of step 0."""
    valid = rows.valid(step)
    tokens = rows.ids.gather(1, rows.index(2 + step))[valid]
    return StepView(scores, law.roll(-step, dims=1)[valid], tokens, end.known(tokens), valid)


def divergence(step: StepView) -> Tensor:
    """Mean cross-entropy of the draft under the target's law, over rows whose token can be proposed; []."""
    if not bool(step.known.any()):
        return step.scores.sum() * 0.0
    return F.cross_entropy(step.scores[step.known], step.law[step.known])
