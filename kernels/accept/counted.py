"""What the Triton kernels of this op share: the counted noise, and the best of many scores.

Knows no tensors of a step. Uniforms have the twin's bits; logarithms are the device's and may differ in the last one.
"""

import triton
import triton.language as tl

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    # Philox4x32-10; every operand is uint32
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        low1 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words(seed, position, first_id, stream: tl.constexpr, TILE: tl.constexpr):
    # The random words of ids first_id .. first_id + TILE - 1, in order.
    counter = (first_id // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = tl.zeros([TILE // 4], tl.uint32)
    w0, w1, w2, w3 = philox(
        counter,
        zero + (position & 0xFFFFFFFF).to(tl.uint32),
        zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32),
        zero + stream,
        zero + (seed & 0xFFFFFFFF).to(tl.uint32),
        zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform(drawn, WIDE: tl.constexpr):
    # Correctly rounded steps only: the twin's bits.
    u = (drawn.to(WIDE) + 0.5) * 2.3283064365386963e-10  # 2^-32
    if tl.float32 == WIDE:
        u = tl.minimum(u, 0.99999994)  # 1 - 2^-24
    return u


@triton.jit
def gumbel(u):
    # -log(-log1p(-u)); what rounding takes from 1 - u is added back, so that small u keep their digits
    rest = 1.0 - u
    lost = (1.0 - rest) - u
    return -tl.log(-(tl.log(rest) + lost))


@triton.jit
def best(scores, ids):
    # The largest score and the lowest id that has it.
    top = tl.max(scores, 0)
    return top, tl.min(tl.where(scores == top, ids, NO_ID), 0)


@triton.jit
def divide(x, y, WIDE: tl.constexpr):
    return tl.div_rn(x, y) if tl.float32 == WIDE else x / y


@triton.jit
def reduce(tops_ptr, ids_ptr, rows, is_row, S, S_POW2: tl.constexpr):
    # Of some rows, [N]: the chosen id, 0 where the row cannot choose, and whether it can.
    tile = tl.arange(0, S_POW2)
    place = rows[:, None] * S + tile[None, :]
    inside = is_row[:, None] & (tile < S)[None, :]
    tops = tl.load(tops_ptr + place, mask=inside, other=-float("inf"))
    ids = tl.load(ids_ptr + place, mask=inside, other=NO_ID)
    top = tl.max(tops, 1)
    chosen = tl.min(tl.where(tops == top[:, None], ids, NO_ID), 1)
    is_finite = (top < float("inf")) & (top > -float("inf"))
    return tl.where(is_finite, chosen, 0), is_finite
