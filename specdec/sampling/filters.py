"""Filters: min_p, top_k and top_p as masks over scores, without sorting the vocabulary.

They know scores and thresholds of the rows that ask for a filter; rows that do not ask never come
here. Filtered tokens get -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sampling.likeliest import Likeliest, at_least, group_maxima, kth_bound, row_sums

_FIRST_CANDIDATES = 128
_NO_BOUND = float("-inf")


def filter_rows(
    scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float] | None = None
) -> Tensor:
    """Keep, in each row, tokens of min_p times the largest probability, the top_k of them, the nucleus of those.

    scores   [R, V]   temperature applied; float32 or float64
    top_k    [R]      0: no limit
    top_p    [R]      in (0, 1]; the smallest set of likeliest tokens whose mass reaches it
    min_p    [R]      0: no limit
    returns  [R, V]   scores where kept, -inf elsewhere

    Ties at a limit of top_k or top_p go to the lower ids. Each filter sees the law that the one before it left.
    (Nucleus: Holtzman et al. 2020, section 3.1. min_p: Nguyen et al. 2024, arXiv 2407.01082.)
    """
    vocab_size = scores.shape[1]
    limit = torch.tensor([min(k or vocab_size, vocab_size) for k in top_k], device=scores.device)
    mass = torch.tensor(list(top_p), dtype=scores.dtype, device=scores.device)
    ratio = torch.tensor(list(min_p or [0.0] * len(top_k)), dtype=scores.dtype, device=scores.device)
    maxima = group_maxima(scores)
    largest = maxima.amax(dim=1)
    floor = torch.where(ratio > 0, largest + torch.log(ratio), _NO_BOUND)
    kept = torch.full_like(scores, _NO_BOUND)
    # A row whose law the limits have cut is renormalised over its survivors, which are at hand; one that only
    # the nucleus cuts is measured against the whole row, and looked at widely only where few tokens do not do.
    is_open = (limit >= vocab_size) & (ratio == 0)
    closed, open_rows = torch.nonzero(~is_open)[:, 0], torch.nonzero(is_open)[:, 0]
    if len(closed):
        part = _rows(scores, closed)
        bound = torch.maximum(floor[closed], kth_bound(part, maxima[closed], limit[closed]))
        _put(kept, closed, *_closed(at_least(part, bound), limit[closed], mass[closed]))
    if len(open_rows):
        _nucleus(scores, maxima, mass, open_rows, kept)
    return kept


def _rows(scores: Tensor, rows: Tensor) -> Tensor:
    return scores if len(rows) == scores.shape[0] else scores[rows]


def _put(kept: Tensor, rows: Tensor, found: Likeliest, keep: Tensor) -> None:
    """Write the first keep[i] candidates of rows[i] back."""
    inside = torch.arange(found.scores.shape[1], device=keep.device) < keep[:, None]
    where = rows[:, None].expand_as(found.ids)[inside]
    kept[where, found.ids[inside]] = found.scores[inside]


def _closed(found: Likeliest, limit: Tensor, mass: Tensor) -> tuple[Likeliest, Tensor]:
    """How many candidates stay when all survivors of min_p and top_k are among them: keep [R]."""
    survivors = torch.minimum(found.counts, limit)
    weights = torch.exp(found.scores - found.scores[:, :1])
    sums = weights.cumsum(dim=1)  # one after the other, so the padding behind a row changes nothing
    total = sums.gather(1, (survivors - 1).clamp_min(0)[:, None])
    reached = (sums < mass[:, None] * total).sum(dim=1)  # tokens before the one that reaches the mass
    keep = torch.where(mass < 1, torch.minimum(reached + 1, survivors), survivors)
    return found, keep


def _nucleus(scores: Tensor, maxima: Tensor, mass: Tensor, rows: Tensor, kept: Tensor) -> None:
    """The nucleus of rows that have no other limit, first among few candidates, then among all it can reach."""
    part, mass, maxima = _rows(scores, rows), mass[rows], maxima[rows]
    largest = maxima.amax(dim=1)
    wanted = row_sums(torch.exp(part - largest[:, None])) * mass
    few = torch.full((len(rows),), min(_FIRST_CANDIDATES, maxima.shape[1]), device=rows.device)
    found, keep, is_enough = _reach(part, kth_bound(part, maxima, few), largest, wanted)
    _put(kept, rows[is_enough], _select(found, is_enough), keep[is_enough])
    if bool(is_enough.all()):
        return
    # Tokens each lighter than (1 - mass) / V of the row weigh less than 1 - mass together: the nucleus needs none.
    missing = ~is_enough
    part, largest, wanted, mass = part[missing], largest[missing], wanted[missing], mass[missing]
    lightest = torch.log(wanted / mass * (1 - mass) / (2 * part.shape[1])) + largest
    found, keep, _ = _reach(part, lightest, largest, wanted)
    _put(kept, rows[missing], found, keep)


def _reach(scores: Tensor, bound: Tensor, largest: Tensor, wanted: Tensor) -> tuple[Likeliest, Tensor, Tensor]:
    """Candidates above a bound, how many of them the wanted weight takes [R], and whether they have it [R]."""
    found = at_least(scores, bound)
    sums = torch.exp(found.scores - largest[:, None]).cumsum(dim=1)
    reached = ((sums < wanted[:, None]) & torch.isfinite(found.scores)).sum(dim=1)
    return found, torch.minimum(reached + 1, found.counts), ~(reached >= found.counts)


def _select(found: Likeliest, rows: Tensor) -> Likeliest:
    return Likeliest(found.scores[rows], found.ids[rows], found.counts[rows])
