"""What verification and prefill share on a GPU: one tile of queries walks over a run of paged keys.

A tile is BLOCK_M pairs (query token, query head) of one row and one KV group, heads fastest, so that every key that is
read serves them all. Scores and sums live in ACC (float32; float64 for float64), in units of log2: weights are exp2.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_rows(tile, query_len, seq_len, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return of each pair in a tile: its query token, its head within the group, its own position (-1 for none)."""
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // HEADS
    own = tl.where(token < query_len, seq_len - query_len + token, -1)
    return token, pair % HEADS, own


@triton.jit
def first_visible(position, WINDOW: tl.constexpr):
    """Return the oldest position that a token at `position` sees."""
    if WINDOW == 0:
        return position * 0
    return tl.maximum(position - (WINDOW - 1), 0)


@triton.jit
def finite_or_zero(m):
    """Return what to subtract before exp2: where nothing was seen yet, -inf - -inf would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def decode_e4m3(bits, DOT: tl.constexpr):
    """Return the values of e4m3 bytes, exactly: shifted into a float16 they are 2^-8 of what they mean."""
    word = bits.to(tl.int16)
    half = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    return tl.where((word & 0x7F) == 0x7F, float("nan"), value).to(DOT)


@triton.jit
def load_paged(cache, slot, is_read, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr):
    """Return one group's vectors at `slot` [BLOCK_N] as [BLOCK_N, BLOCK] in DOT, zero where nothing may be read."""
    column = tl.arange(0, BLOCK)
    mask = is_read[:, None] & (column < WIDTH)[None, :]
    if cache.dtype.element_ty == tl.uint8:
        raw = tl.load(cache + slot[:, None] * (GROUPS * WIDTH) + column[None, :], mask=mask, other=0)
        return decode_e4m3(raw, DOT)
    return tl.load(cache + slot[:, None] * (GROUPS * WIDTH) + column[None, :], mask=mask, other=0.0).to(DOT)


@triton.jit
def soft_cap(x, CAP: tl.constexpr, ACC: tl.constexpr):
    """Return CAP * tanh(x / CAP); a series where 1 - exp(-2|y|) would cancel."""
    cap = tl.full([], CAP, ACC)
    y = x / cap
    t = tl.exp2(-2.0 * tl.full([], LOG2_E, ACC) * tl.abs(y))
    far = (1.0 - t) / (1.0 + t)
    y2 = y * y
    near = y * (
        1.0 - y2 * (tl.full([], 1 / 3, ACC) - y2 * (tl.full([], 2 / 15, ACC) - y2 * tl.full([], 17 / 315, ACC)))
    )
    return cap * tl.where(tl.abs(y) < 0.05, near, tl.where(y < 0, -far, far))


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D]   zero beyond D
    own,  # [BLOCK_M]          a pair's position; -1 where the tile has no pair
    low,  # positions low <= n < high are read; the walk begins at low's multiple of BLOCK_N
    high,
    m,  # [BLOCK_M]            running maximum of the scores
    total,  # [BLOCK_M]            running sum of exp2(score - m)
    acc,  # [BLOCK_M, BLOCK_DV]
    table,  # [P]              this row's blocks
    k_cache,  # [num_blocks, block_size, GROUPS, D], at this group's first vector
    v_cache,
    k_scale,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False where every pair sees every key of the run
    DOT: tl.constexpr,
):
    """Return (m, total, acc) after the run. Keys that a pair does not see leave its numbers as they are, to the bit."""
    ACC: tl.constexpr = acc.dtype
    for start in tl.range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_read = (n >= low) & (n < high)
        block = tl.load(table + n // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + n % BLOCK_SIZE
        k = load_paged(k_cache, slot, is_read, GROUPS, D, BLOCK_D, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        if SOFTCAP > 0:
            scores = soft_cap(scores * (tl.full([], SCALE, ACC) * k_scale), SOFTCAP, ACC) * tl.full([], LOG2_E, ACC)
        else:
            scores = scores * (tl.full([], SCALE * LOG2_E, ACC) * k_scale)
        if IS_MASKED:
            is_visible = (n[None, :] <= own[:, None]) & is_read[None, :]
            if WINDOW > 0:
                is_visible &= n[None, :] > own[:, None] - WINDOW
            scores = tl.where(is_visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = finite_or_zero(m_new)
        kept = tl.exp2(m - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * kept + tl.sum(p, 1)
        v = load_paged(v_cache, slot, is_read, GROUPS, DV, BLOCK_DV, DOT)
        acc = tl.dot(p.to(DOT), v, acc * kept[:, None], input_precision="ieee", out_dtype=ACC)
        m = m_new
    return m, total, acc
