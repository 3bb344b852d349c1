"""Filters: min_p, top_k and top_p, without sorting the vocabulary.

They know scores and thresholds of the rows that ask for a filter; rows that do not ask never come here.
A row is first reduced to a shortlist of its likeliest tokens; only a nucleus that does not fit one is
looked for in the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.likeliest import Likeliest, at_least, group_maxima, kth_bound, row_sums

_FIRST_CANDIDATES = 128
_NEVER = float("-inf")
_NUM_BINS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What each row asks for, [R] each.

    top_k         V or more: no limit
    top_p         in (0, 1]; the smallest set of likeliest tokens whose mass reaches it
    min_p         tokens of this times the largest probability; 0: no limit
    temperature   at which the masses are measured; scores come undivided
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, scores: Tensor, rows: Sequence[tuple[int, float, float, float]]) -> Limits:
        """From (top_k, top_p, min_p, temperature) of each row; a top_k of 0 is no limit."""
        vocab_size = scores.shape[1]
        top_k = [min(k or vocab_size, vocab_size) for k, _, _, _ in rows]
        rest = torch.tensor([row[1:] for row in rows], dtype=scores.dtype, device=scores.device)
        return cls(torch.tensor(top_k, device=scores.device), rest[:, 0], rest[:, 1], rest[:, 2])

    def of_rows(self, rows: Tensor) -> Limits:
        """Those of some rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.temperature[rows])


@dataclass(frozen=True, slots=True)
class Shortlist:
    """What the filters keep of each row: the first keep[i] of its likeliest tokens.

    keep          [R]
    is_complete   [R]   False where the nucleus is wider than the list
    bound         [R]   every score that reaches it is on the list
    wanted        [R]   weight of the nucleus, where the largest score weighs 1
    """

    found: Likeliest
    keep: Tensor
    is_complete: Tensor
    bound: Tensor
    wanted: Tensor


def shortlist(scores: Tensor, limits: Limits) -> Shortlist:
    """Apply min_p, then top_k, then top_p; each sees the law that the one before it left.

    scores   [R, V]   float32 or float64, not divided by the temperature

    Ties at a limit of top_k or top_p go to the lower ids. A law that min_p or top_k has cut is
    renormalised over its survivors, which are at hand; one that only top_p cuts is measured whole.
    (Nucleus: Holtzman et al. 2020, section 3.1. min_p: Nguyen et al. 2024, arXiv 2407.01082.)
    """
    maxima = group_maxima(scores)
    largest = maxima.amax(dim=1)
    floor = torch.where(limits.min_p > 0, largest + limits.temperature * torch.log(limits.min_p), _NEVER)
    is_open = (limits.top_k >= scores.shape[1]) & (limits.min_p == 0) & (limits.top_p < 1)
    few = min(_FIRST_CANDIDATES, scores.shape[1] - 1)
    bound = torch.maximum(floor, kth_bound(scores, maxima, limits.top_k.masked_fill(is_open, max(few, 1))))
    found = at_least(scores, maxima, bound)
    survivors = torch.minimum(found.counts, limits.top_k)
    sums = _weights(found.scores, largest, limits).cumsum(dim=1)  # in turn, so the padding behind a row adds nothing
    total = sums.gather(1, (survivors - 1).clamp_min(0)[:, None])[:, 0]
    rows = torch.nonzero(is_open)[:, 0]
    if len(rows):
        total[rows] = row_sums(_weights(_rows(scores, rows), largest[rows], limits.of_rows(rows)))
    wanted = limits.top_p * total
    reached = _before(sums, wanted, survivors)
    keep = torch.where(limits.top_p < 1, torch.minimum(reached + 1, survivors), survivors)
    return Shortlist(found, keep, ~is_open | (reached < survivors), bound, wanted)


def _weights(scores: Tensor, largest: Tensor, limits: Limits) -> Tensor:
    return torch.exp((scores - largest[:, None]).div_(limits.temperature[:, None]))


def _rows(scores: Tensor, rows: Tensor) -> Tensor:
    return scores if len(rows) == scores.shape[0] else scores.index_select(0, rows)


def _before(sums: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """How many of the first counts[i] running sums stay below the wanted weight, [R]."""
    is_candidate = torch.arange(sums.shape[1], device=sums.device) < counts[:, None]
    return ((sums < wanted[:, None]) & is_candidate).sum(dim=1)


def mask(scores: Tensor, limits: Limits, short: Shortlist) -> Tensor:
    """Scores where kept, -inf elsewhere, [R, V]; undivided as they came."""
    kept = torch.full_like(scores, _NEVER)
    _put(kept, torch.arange(len(scores), device=scores.device), short.found, short.keep)
    rows = torch.nonzero(~short.is_complete)[:, 0]
    if len(rows):
        kept[rows] = _nucleus(_rows(scores, rows), limits.of_rows(rows), short.bound[rows], short.wanted[rows])
    return kept


def _put(kept: Tensor, rows: Tensor, found: Likeliest, keep: Tensor) -> None:
    """Write the first keep[i] candidates of rows[i] back."""
    inside = torch.arange(found.scores.shape[1], device=keep.device) < keep[:, None]
    where = rows[:, None].expand_as(found.ids)[inside]
    kept[where, found.ids[inside]] = found.scores[inside]


def _nucleus(scores: Tensor, limits: Limits, bound: Tensor, wanted: Tensor) -> Tensor:
    """The nucleus of rows where it is wide: scores [R, V] masked.

    Weights are added up by bins of the score; only the bin in which the nucleus ends is sorted.
    """
    largest = scores.amax(dim=1)
    weights = _weights(scores, largest, limits)
    # Tokens each lighter than (1 - top_p) / V of the row weigh less than 1 - top_p together: none is needed.
    share = wanted / limits.top_p * (1 - limits.top_p) / (2 * scores.shape[1])
    low = (largest + limits.temperature * torch.log(share)).clamp_min(torch.finfo(scores.dtype).min)
    per_bin = _NUM_BINS / (bound - low)
    bins = ((scores - low[:, None]).mul_(per_bin[:, None])).floor_().clamp_(-1, _NUM_BINS).nan_to_num_(-1)
    bins = bins.add_(1).long()  # 0: below what can be needed; _NUM_BINS + 1: on the shortlist, all needed
    mass = weights.new_zeros(len(weights), _NUM_BINS + 3).scatter_add_(1, bins, weights)
    tail = mass.flip(1).cumsum(dim=1).flip(1)  # of a bin and all above it
    last = ((tail >= wanted[:, None]).sum(dim=1) - 1).clamp(1, _NUM_BINS)
    is_inside = bins > last[:, None]
    below = scores.masked_fill(bins != last[:, None], _NEVER)
    found = at_least(below, group_maxima(below), torch.full_like(low, torch.finfo(scores.dtype).min))
    sums = tail.gather(1, last[:, None] + 1) + _weights(found.scores, largest, limits).cumsum(dim=1)
    keep = torch.minimum(_before(sums, wanted, found.counts) + 1, found.counts)
    kept = scores.masked_fill(~is_inside, _NEVER)
    _put(kept, torch.arange(len(kept), device=kept.device), found, keep)
    return kept


def filter_rows(
    scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float] | None = None
) -> Tensor:
    """Shortlist and mask in one, at temperature 1: scores [R, V] -> [R, V], -inf where not kept."""
    rows = zip(top_k, top_p, min_p or [0.0] * len(top_k), [1.0] * len(top_k), strict=True)
    limits = Limits.of(scores, list(rows))
    return mask(scores, limits, shortlist(scores, limits))
