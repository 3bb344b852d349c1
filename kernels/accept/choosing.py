"""Shared-noise choice and judgement on a GPU: the logits are read once, nothing of their size is written.

The vocabulary is cut at fixed places; a program owns one row's tile and leaves the best score and its id, so a row's
choice has the same bits in any batch.
"""

import triton
import triton.language as tl

from specdec.kernels.accept.counted import NO_ID, best, divide, gumbel, reduce, uniform, words
from specdec.kernels.accept.reference import GREEDY_BELOW

_GREEDY = tl.constexpr(GREEDY_BELOW)


@triton.jit(do_not_specialize=["S"])
def choose_kernel(
    logits_ptr,  # [L, V]
    seeds_ptr,  # [L]
    positions_ptr,  # [L]
    temperatures_ptr,  # [L]
    tops_ptr,  # [L, S]   best score of a tile; +inf where the tile holds NaN or +inf
    ids_ptr,  # [L, S]    its id
    row_stride,
    V,
    S,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    # One program owns one tile of one row.
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < V, other=-float("inf")).to(WIDE)
    temperature = tl.load(temperatures_ptr + row).to(WIDE)
    scores = x
    if temperature >= _GREEDY:
        drawn = words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tile * TILE, 0, TILE)
        scores = divide(x, temperature, WIDE) + gumbel(uniform(drawn, WIDE))
    is_bad = tl.max((~(x < float("inf"))).to(tl.int32), 0) > 0
    top, best_id = best(scores, ids)
    tl.store(tops_ptr + row * S + tile, tl.where(is_bad, float("inf"), top))
    tl.store(ids_ptr + row * S + tile, best_id)


@triton.jit(do_not_specialize=["L", "S"])
def finish_kernel(
    tops_ptr,  # [L, S]
    ids_ptr,  # [L, S]
    token_ids_ptr,  # [L]
    is_finite_ptr,  # [L]
    L,
    S,
    S_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program reduces the tiles of ROWS rows.
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    chosen, is_finite = reduce(tops_ptr, ids_ptr, rows, rows < L, S, S_POW2)
    tl.store(token_ids_ptr + rows, chosen.to(tl.int64), mask=rows < L)
    tl.store(is_finite_ptr + rows, is_finite, mask=rows < L)


@triton.jit(do_not_specialize=["S"])
def judge_kernel(
    tops_ptr,  # [L, S]
    ids_ptr,  # [L, S]
    drafts_ptr,  # [L]          the draft behind each logits row; a request's last is not read
    bounds_ptr,  # [B + 1]
    token_ids_ptr,  # [L]
    num_accepted_ptr,  # [B]
    next_ids_ptr,  # [B]
    is_finite_ptr,  # [B]
    S,
    S_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program owns one request: the first of its rows that disagrees with its draft ends the prefix.
    request = tl.program_id(0)
    first = tl.load(bounds_ptr + request).to(tl.int64)
    size = tl.load(bounds_ptr + request + 1).to(tl.int64) - first
    accepted = tl.zeros([], tl.int32) + NO_ID
    next_id = tl.zeros([], tl.int64)
    first_bad = tl.zeros([], tl.int32) + NO_ID
    for start in range(0, size, ROWS):
        j = (start + tl.arange(0, ROWS)).to(tl.int32)
        is_row = j < size
        chosen, is_finite = reduce(tops_ptr, ids_ptr, first + j, is_row, S, S_POW2)
        chosen = chosen.to(tl.int64)
        draft = tl.load(drafts_ptr + first + j, mask=j < size - 1, other=-1)
        tl.store(token_ids_ptr + first + j, chosen, mask=is_row)
        end = tl.min(tl.where(is_row & (chosen != draft), j, NO_ID), 0)
        first_bad = tl.minimum(first_bad, tl.min(tl.where(is_row & ~is_finite, j, NO_ID), 0))
        is_new = (accepted == NO_ID) & (end != NO_ID)
        next_id = tl.where(is_new, tl.sum(tl.where(j == end, chosen, 0), 0), next_id)
        accepted = tl.minimum(accepted, end)
    accepted = tl.where(size > 0, accepted, 0)
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(next_ids_ptr + request, next_id)
    tl.store(is_finite_ptr + request, first_bad > accepted)
