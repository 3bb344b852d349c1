"""Filters: top_k and top_p as masks over scores, without sorting the vocabulary.

It knows scores and thresholds of the rows that ask for a filter; rows that do not ask never come
here. Filtered tokens get -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_CANDIDATES = 256


def filter_rows(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Keep, in each row, the top_k likeliest tokens, and of those the nucleus of mass top_p.

    scores   [L, V]   temperature applied; float32 or float64
    top_k    [L]      0: no limit
    top_p    [L]      in (0, 1]; the smallest set of likeliest tokens whose mass reaches it
    returns  [L, V]   scores where kept, -inf elsewhere

    Ties at a limit go to the lower ids. The nucleus is measured on the law left by top_k.
    (Nucleus: Holtzman et al. 2020, section 3.1.)
    """
    kept = torch.full_like(scores, float("-inf"))
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        values, ids = _candidates(scores[row], k, p)
        kept[row, ids] = values
    return kept


def _candidates(scores: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The kept scores of one row and their ids."""
    size = scores.shape[0]
    limit = min(top_k or size, size)
    if top_p >= 1.0:
        return _largest(scores, limit)
    # With top_k the law is renormalised over its survivors, so the mass is known once they are; without
    # it the normaliser is the whole row's, and the search widens only while the mass is not reached.
    total = torch.logsumexp(_largest(scores, limit)[0] if limit < size else scores, dim=0)
    count = min(limit, _FIRST_CANDIDATES)
    while True:
        values, ids = _largest(scores, count)
        mass = torch.exp(values - total).cumsum(0)
        reached = int((mass < top_p).sum())  # tokens before the one that reaches the mass
        if reached < count or count == limit:
            keep = min(reached + 1, count)
            return values[:keep], ids[:keep]
        count = min(count * 8, limit)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores, largest first, ties to the lower id."""
    values, ids = torch.topk(scores, count)
    at_edge = scores == values[-1]
    if int(at_edge.sum()) > int((values == values[-1]).sum()):  # topk chose among equals at the edge by itself
        above = torch.nonzero(scores > values[-1])[:, 0]
        edge = torch.nonzero(at_edge)[: count - above.shape[0], 0]
        ids = torch.cat([above, edge])
    else:
        ids = ids.sort().values
    order = torch.argsort(scores[ids], descending=True, stable=True)
    return scores[ids][order], ids[order]
