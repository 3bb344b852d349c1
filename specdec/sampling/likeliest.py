"""The likeliest tokens of each row, found without sorting the vocabulary.

It knows rows of scores and thresholds. The columns of a row are dealt into groups; the k-th largest of
the groups' maxima is a bound that at least k scores reach, so only scores above it need sorting. What
is computed for a row does not depend on the rows beside it, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP = 64


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The candidates of every row, largest score first, ties to the lower id, padded to the same length.

    scores   [R, C]   -inf behind the last candidate
    ids      [R, C]   0 behind the last candidate
    counts   [R]      candidates of a row
    """

    scores: Tensor
    ids: Tensor
    counts: Tensor


def _grouped(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Columns dealt into groups: [R, _GROUP, V // _GROUP], and the few left over."""
    num_groups = scores.shape[1] // _GROUP
    dealt = num_groups * _GROUP
    return scores[:, :dealt].view(scores.shape[0], _GROUP, num_groups), scores[:, dealt:]


def group_maxima(scores: Tensor) -> Tensor:
    """Largest score of each group, those left over for themselves: [R, V] -> [R, M]."""
    if scores.shape[1] < _GROUP:
        return scores
    groups, rest = _grouped(scores)
    return torch.cat([groups.amax(dim=1), rest], dim=1)


def row_sums(values: Tensor) -> Tensor:
    """Sum of each row, added in an order that only V decides: [R, V] -> [R].

    A plain sum over one long row is split among threads, and then its last bits depend on their number.
    """
    if values.shape[1] < _GROUP:
        return values.sum(dim=1)
    groups, rest = _grouped(values)
    return groups.sum(dim=1).sum(dim=1) + rest.sum(dim=1)


def kth_bound(scores: Tensor, maxima: Tensor, count: Tensor) -> Tensor:
    """A bound that at least `count` scores of the row reach, and few more where it can be had cheaply.

    scores   [R, V]   maxima   [R, M]   of its groups
    count    [R]      at least 1; V or more: no bound
    returns  [R]      not -inf, so that -inf never reaches it
    """
    lowest = torch.finfo(scores.dtype).min
    bound = scores.new_full((scores.shape[0],), lowest)
    is_few = count <= maxima.shape[1]
    for source, is_own in ((maxima, is_few), (scores, ~is_few & (count < scores.shape[1]))):
        rows = torch.nonzero(is_own)[:, 0]
        if len(rows):
            best = torch.topk(source[rows], int(count[rows].max()), dim=1).values
            bound[rows] = best.gather(1, count[rows][:, None] - 1)[:, 0]
    return bound.clamp_min(lowest)


def at_least(scores: Tensor, maxima: Tensor, bound: Tensor) -> Likeliest:
    """All scores of each row that reach its bound: scores [R, V], maxima [R, M] of its groups, bound [R].

    Only groups whose maximum reaches the bound are looked into.
    """
    groups, _ = _grouped(scores)
    num_groups = groups.shape[2] if maxima.shape[1] < scores.shape[1] else 0
    rows, places = torch.nonzero(maxima >= bound[:, None], as_tuple=True)
    is_group = places < num_groups
    group_rows, group_places = rows[is_group], places[is_group]
    values = groups[group_rows, :, group_places]  # [N, _GROUP]
    which, member = torch.nonzero(values >= bound[group_rows][:, None], as_tuple=True)
    single_rows, single_places = rows[~is_group], places[~is_group]
    rows = torch.cat([group_rows[which], single_rows])
    ids = torch.cat([member * num_groups + group_places[which], single_places + num_groups * (_GROUP - 1)])
    rows, ids = _in_order(rows, ids, scores.shape[1]) if num_groups else (single_rows, single_places)
    counts = torch.bincount(rows, minlength=scores.shape[0])
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (scores.shape[0], max(int(counts.max()), 1))
    found = scores.new_full(shape, float("-inf"))
    found[rows, place] = scores[rows, ids]
    found_ids = torch.zeros(shape, dtype=torch.int64, device=scores.device)
    found_ids[rows, place] = ids
    found, order = found.sort(dim=1, descending=True, stable=True)  # ids ascend, so equals keep that order
    return Likeliest(found, found_ids.gather(1, order), counts)


def _in_order(rows: Tensor, ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by row, then id."""
    key = (rows * vocab_size + ids).sort().values
    rows = torch.div(key, vocab_size, rounding_mode="floor")
    return rows, key - rows * vocab_size
