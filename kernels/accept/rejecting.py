"""Classical rejection on a GPU: coins against p / q, then one draw from what p has over q.

(Leviathan, Kalman, Matias 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318.) All rows are
read once for their sums; only the row at which a request's prefix ends is read again.
"""

import triton
import triton.language as tl

from specdec.kernels.accept.counted import best, gumbel, reduce, uniform, words
from specdec.kernels.accept.reference import COIN_STREAM

_COIN_STREAM = tl.constexpr(COIN_STREAM)


@triton.jit(do_not_specialize=[])
def normalise_kernel(
    scores_ptr,  # [L, V]
    tops_ptr,  # [L, S]   largest score of a tile; +inf where the tile holds NaN or +inf
    sums_ptr,  # [L, S]   sum of exp(score - top)
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
    x = tl.load(scores_ptr + row * row_stride + ids, mask=ids < V, other=-float("inf")).to(WIDE)
    is_bad = tl.max((~(x < float("inf"))).to(tl.int32), 0) > 0
    top = tl.where(is_bad, float("inf"), tl.max(x, 0))
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops_ptr + row * S + tile, top)
    tl.store(sums_ptr + row * S + tile, tl.sum(tl.exp(x - shift), 0))


@triton.jit(do_not_specialize=["S"])
def coin_kernel(
    scores_ptr,  # [L, V]
    probs_ptr,  # [L, V]        what drafts were drawn from; not read where IS_CERTAIN
    drafts_ptr,  # [L]
    seeds_ptr,  # [L]
    positions_ptr,  # [L]
    tops_ptr,  # [L, S]
    sums_ptr,  # [L, S]
    log_sums_ptr,  # [L]
    bounds_ptr,  # [B + 1]
    num_accepted_ptr,  # [B]
    is_finite_ptr,  # [B]
    row_stride,
    prob_stride,
    S,
    WIDE: tl.constexpr,
    S_POW2: tl.constexpr,
    IS_CERTAIN: tl.constexpr,
):
    # One program owns one request and tosses until a draft is refused.
    request = tl.program_id(0)
    row = tl.load(bounds_ptr + request).to(tl.int64)
    last = tl.load(bounds_ptr + request + 1).to(tl.int64) - 1
    accepted = tl.zeros([], tl.int32)
    is_finite = tl.full([], 1, tl.int32)
    is_open = row <= last
    tile = tl.arange(0, S_POW2)
    while is_open:
        tops = tl.load(tops_ptr + row * S + tile, mask=tile < S, other=-float("inf"))
        sums = tl.load(sums_ptr + row * S + tile, mask=tile < S, other=0.0)
        top = tl.max(tops, 0)
        can_choose = (top < float("inf")) & (top > -float("inf"))
        shift = tl.where(can_choose, top, 0.0)
        log_sum = shift + tl.log(tl.sum(tl.where(tile < S, sums * tl.exp(tops - shift), 0.0), 0))
        tl.store(log_sums_ptr + row, log_sum)
        is_open = (row < last) & can_choose
        if is_open:
            draft = tl.load(drafts_ptr + row)
            p = tl.exp(tl.load(scores_ptr + row * row_stride + draft).to(WIDE) - log_sum)
            q = p * 0 + 1.0
            if not IS_CERTAIN:
                q = tl.load(probs_ptr + row * prob_stride + draft).to(WIDE)
            drawn = words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), 0, _COIN_STREAM, 4)
            coin = tl.sum(tl.where(tl.arange(0, 4) == 0, uniform(drawn, WIDE), 0.0), 0)
            is_open = coin * q < p
            accepted += is_open.to(tl.int32)
        is_finite = tl.where(can_choose, is_finite, 0)
        row += 1
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(is_finite_ptr + request, is_finite > 0)


@triton.jit(do_not_specialize=["S"])
def residual_kernel(
    scores_ptr,  # [L, V]
    probs_ptr,  # [L, V]   not read where IS_CERTAIN
    drafts_ptr,  # [L]
    seeds_ptr,  # [L]
    positions_ptr,  # [L]
    log_sums_ptr,  # [L]
    bounds_ptr,  # [B + 1]
    num_accepted_ptr,  # [B]
    tops_ptr,  # [B, 2, S]   of the residual, and of p itself for where rounding left no residual
    ids_ptr,  # [B, 2, S]
    row_stride,
    prob_stride,
    V,
    S,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    IS_CERTAIN: tl.constexpr,
):
    # One program owns one tile of the row at which its request's prefix ends.
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(bounds_ptr + request).to(tl.int64) + tl.load(num_accepted_ptr + request)
    end = tl.load(bounds_ptr + request + 1).to(tl.int64)
    if row >= end:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(scores_ptr + row * row_stride + ids, mask=ids < V, other=-float("inf")).to(WIDE)
    log_p = x - tl.load(log_sums_ptr + row)
    drawn = words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tile * TILE, 0, TILE)
    g = gumbel(uniform(drawn, WIDE))
    if IS_CERTAIN:
        draft = tl.load(drafts_ptr + row, mask=row < end - 1, other=-1)
        q = tl.where(ids == draft, 1.0, 0.0).to(WIDE)
    else:
        q = tl.load(probs_ptr + row * prob_stride + ids, mask=ids < V, other=0.0).to(WIDE)
    rest = tl.where(q > 0.0, tl.log(tl.maximum(tl.exp(log_p) - q, 0.0)), log_p)
    place = request * 2 * S + tile
    top, best_id = best(rest + g, ids)
    tl.store(tops_ptr + place, top)
    tl.store(ids_ptr + place, best_id)
    top, best_id = best(log_p + g, ids)
    tl.store(tops_ptr + place + S, top)
    tl.store(ids_ptr + place + S, best_id)


@triton.jit(do_not_specialize=["S"])
def recover_kernel(
    tops_ptr,  # [B, 2, S]
    ids_ptr,  # [B, 2, S]
    bounds_ptr,  # [B + 1]
    is_finite_ptr,  # [B]
    next_ids_ptr,  # [B]
    S,
    S_POW2: tl.constexpr,
):
    # One program owns one request.
    request = tl.program_id(0).to(tl.int64)
    num_rows = tl.load(bounds_ptr + request + 1) - tl.load(bounds_ptr + request)
    which = tl.arange(0, 2)
    chosen, can_choose = reduce(tops_ptr, ids_ptr, request * 2 + which, which < num_rows * 2, S, S_POW2)
    first = tl.sum(tl.where(which == 0, chosen, 0), 0)
    second = tl.sum(tl.where(which == 1, chosen, 0), 0)
    has_residual = tl.sum(tl.where((which == 0) & can_choose, 1, 0), 0) > 0
    next_id = tl.where(tl.load(is_finite_ptr + request), tl.where(has_residual, first, second), 0)
    tl.store(next_ids_ptr + request, next_id.to(tl.int64))
