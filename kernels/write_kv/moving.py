"""Moving keys and values on a GPU: one program owns a token's heads, and quantises them where the cache is fp8.

The bytes of e4m3 are made with integers, so that they are the twin's on every target: of ours only sm_90 converts
to this format in hardware.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3(x):
    # The byte of a float32, rounded to nearest even and held at +-448; NaN stays NaN.
    size = tl.minimum(tl.abs(x), 448.0)
    word = size.to(tl.int32, bitcast=True)
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9: an addition to 2^14 rounds to them.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0.015625, subnormal, normal)
    byte = tl.where(x == x, byte, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (byte | sign).to(tl.uint8)


@triton.jit
def _move(x_ptr, scales_ptr, cache_ptr, slot, heads, x_head_stride, GROUPS, D, BLOCK_D: tl.constexpr, HAS_SCALES):
    column = tl.arange(0, BLOCK_D)
    inside = (heads < GROUPS)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + heads[:, None] * x_head_stride + column[None, :], mask=inside)
    if HAS_SCALES:
        scales = tl.load(scales_ptr + heads, mask=heads < GROUPS, other=1.0)
        scales = scales[:, None] + tl.zeros([1, BLOCK_D], tl.float32)
        x = e4m3(tl.div_rn(x.to(tl.float32), scales))
    tl.store(cache_ptr + slot * (GROUPS * D) + heads[:, None] * D + column[None, :], x, mask=inside)


@triton.jit(
    do_not_specialize=["k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def write_kv_kernel(
    k_ptr,  # [T, GROUPS, D]
    v_ptr,  # [T, GROUPS, DV]
    slots_ptr,  # [T]
    k_cache_ptr,  # [num_slots, GROUPS, D]
    v_cache_ptr,  # [num_slots, GROUPS, DV]
    k_scales_ptr,  # [GROUPS]   not read without scales
    v_scales_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_K_SCALES: tl.constexpr,
    HAS_V_SCALES: tl.constexpr,
):
    # One program owns BLOCK_G heads of one token; a padded token has no slot and nothing to move.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    k_ptr += token * k_token_stride
    v_ptr += token * v_token_stride
    _move(k_ptr, k_scales_ptr, k_cache_ptr, slot, heads, k_head_stride, GROUPS, D, BLOCK_D, HAS_K_SCALES)
    _move(v_ptr, v_scales_ptr, v_cache_ptr, slot, heads, v_head_stride, GROUPS, DV, BLOCK_DV, HAS_V_SCALES)
