"""The plain-PyTorch twin of `nucleus`: masses are added up by bins of the score, and one bin is put in order.

They are integers, in units of 2^-40 of the largest, so that their sums are exact in whichever order a device adds.
"""

import math

import torch
from torch import Tensor

BINS = 4096
UNIT = 2.0**40
_NEVER = -math.inf


def nucleus(scores: Tensor, temperatures: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As the door."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    largest = scores.amax(1, keepdim=True)
    scale, top_p, min_p = (x.double()[:, None] for x in (temperatures, top_p, min_p))
    floor = largest.double() + scale * torch.log(min_p)
    scores = scores.masked_fill(scores < floor.to(scores.dtype), _NEVER)
    distance = largest - scores
    mass = (torch.exp(-distance / scale.to(scores.dtype)) * UNIT).nan_to_num(0).long()
    total = mass.sum(1, keepdim=True)
    wanted = top_p * total
    # Ids each lighter than (1 - top_p) / 2 V of the row weigh less than 1 - top_p together: none is needed.
    needed = scale * -torch.log((1 - top_p) * (total / UNIT) / (2 * scores.shape[1]))
    bins = (distance * (BINS / needed).to(scores.dtype)).nan_to_num(BINS).clamp(0, BINS).long()  # BINS: not needed
    sums = mass.new_zeros(len(mass), BINS + 1).scatter_add_(1, bins, mass)[:, :BINS].cumsum(1)
    last = (sums < wanted).sum(1, keepdim=True)  # the bin in which the nucleus ends
    above = sums.gather(1, (last - 1).clamp_min(0)).masked_fill(last == 0, 0)
    kept = scores.masked_fill(bins > last, _NEVER)
    _cut(kept, mass, bins == last, wanted - above)
    keeps_all = (top_p >= 1) | (last == BINS) | ~torch.isfinite(largest)
    return torch.where(keeps_all, scores, kept)


def _cut(kept: Tensor, mass: Tensor, is_last: Tensor, wanted: Tensor) -> None:
    """Drop the members of the last bin that lie beyond the wanted mass, in order of score, then id; in place."""
    rows, ids = torch.nonzero(is_last, as_tuple=True)
    counts = is_last.sum(1)
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(kept), int(counts.max()))
    scores, masses, where = kept.new_full(shape, _NEVER), mass.new_zeros(shape), rows.new_zeros(shape)
    scores[rows, place], masses[rows, place], where[rows, place] = kept[rows, ids], mass[rows, ids], ids
    order = scores.sort(dim=1, descending=True, stable=True).indices  # ids ascend, so equals keep that order
    before = torch.nn.functional.pad(masses.gather(1, order).cumsum(1)[:, :-1], (1, 0))
    is_member = torch.arange(shape[1], device=rows.device) < counts[:, None]
    out, places = torch.nonzero((before >= wanted) & is_member, as_tuple=True)
    kept[out, where.gather(1, order)[out, places]] = _NEVER
