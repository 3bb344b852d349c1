"""Prompt chunks on a GPU: rows of more than MAX_VERIFY_LEN queries, whose tiles walk over all keys they see."""

import triton
import triton.language as tl

from specdec.kernels.paged_attention.tile import LOG2_E, attend_keys, first_visible, tile_rows


@triton.jit(
    do_not_specialize=["table_stride", "q_token_stride", "q_head_stride", "prefill_capacity"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_query_lens"],
)
def prefill_kernel(
    out,  # [T, H, DV]
    q,  # [T, H, D], its strides in units of D
    k_cache,
    v_cache,
    k_scales,  # [GROUPS] or unused
    v_scales,
    sinks,  # [H] or unused
    block_tables,
    seq_lens,
    cu_query_lens,
    prefill_items,  # [2, prefill_capacity]
    num_items,
    table_stride,
    q_token_stride,
    q_head_stride,
    prefill_capacity,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
):
    # A program owns every num_programs-th (row, tile, group): it reads all keys its tile sees and writes the result.
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_DV)
    for i in tl.range(tl.program_id(0), tl.load(num_items + 1) * GROUPS, tl.num_programs(0), num_stages=1):
        group = i % GROUPS
        row = tl.load(prefill_items + i // GROUPS)
        tile = tl.load(prefill_items + prefill_capacity + i // GROUPS)
        begin = tl.load(cu_query_lens + row)
        query_len = tl.load(cu_query_lens + row + 1) - begin
        token, head, own = tile_rows(tile, query_len, tl.load(seq_lens + row), HEADS, BLOCK_M)
        head += group * HEADS
        is_pair = own >= 0

        k_scale = tl.full([], 1.0, ACC)
        v_scale = tl.full([], 1.0, ACC)
        if HAS_SCALES:
            k_scale = tl.load(k_scales + group).to(ACC)
            v_scale = tl.load(v_scales + group).to(ACC)

        at = (begin + token).to(tl.int64)
        q_at = at * q_token_stride + head.to(tl.int64) * q_head_stride
        q_tile = tl.load(
            q + q_at[:, None] * D + column[None, :], mask=is_pair[:, None] & (column < D)[None, :], other=0.0
        ).to(DOT)
        m = tl.full([BLOCK_M], float("-inf"), ACC)
        total = tl.zeros([BLOCK_M], ACC)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
        if HAS_SINKS:
            m = tl.load(sinks + head).to(ACC) * tl.full([], LOG2_E, ACC)
            total = tl.full([BLOCK_M], 1.0, ACC)

        last = tl.max(own, 0)
        earliest = tl.min(tl.where(is_pair, own, last), 0)
        # The keys up to the first query of the tile are seen by all of it; with a window no key is.
        masked_from = first_visible(earliest, WINDOW)
        if WINDOW == 0:
            masked_from = (earliest + 1) // BLOCK_N * BLOCK_N
            m, total, acc = attend_keys(
                q_tile, own, 0, masked_from, m, total, acc,
                block_tables + row.to(tl.int64) * table_stride, k_cache + group * D, v_cache + group * DV, k_scale,
                GROUPS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, SCALE, SOFTCAP, WINDOW, False, DOT,
            )  # fmt: skip
        m, total, acc = attend_keys(
            q_tile, own, masked_from, last + 1, m, total, acc,
            block_tables + row.to(tl.int64) * table_stride, k_cache + group * D, v_cache + group * DV, k_scale,
            GROUPS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, SCALE, SOFTCAP, WINDOW, True, DOT,
        )  # fmt: skip
        out_at = out + (at[:, None] * (GROUPS * HEADS) + head[:, None]) * DV + value_column[None, :]
        tl.store(
            out_at,
            (acc * v_scale / total[:, None]).to(out.dtype.element_ty),
            mask=is_pair[:, None] & (value_column < DV)[None, :],
        )
