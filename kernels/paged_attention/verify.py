"""Verification and decode on a GPU: rows of at most MAX_VERIFY_LEN queries, each context cut into fixed splits.

Splits begin at multiples of SPLIT of the absolute position and are added in one order, and no tile or split depends on
the batch or on how many drafts ride along, so a query has the same bits in any company.
"""

import triton
import triton.language as tl

from specdec.kernels.paged_attention.tile import LOG2_E, attend_keys, finite_or_zero, first_visible, tile_rows


@triton.jit(
    do_not_specialize=["table_stride", "q_token_stride", "q_head_stride", "verify_capacity"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_query_lens", "part_m", "part_l"],
)
def verify_kernel(
    q,  # [T, H, D], its strides in units of D
    k_cache,
    v_cache,
    k_scales,  # [GROUPS] or unused
    v_scales,
    block_tables,
    seq_lens,
    cu_query_lens,
    verify_items,  # [3, verify_capacity]
    num_items,
    row_slots,
    part_acc,  # [num_slots, H, DV]
    part_m,  # [num_slots, H]
    part_l,
    table_stride,
    q_token_stride,
    q_head_stride,
    verify_capacity,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOT: tl.constexpr,
):
    # A program owns every num_programs-th item of the list: one tile of one row against one split of one group's keys.
    ACC: tl.constexpr = part_acc.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_DV)
    for i in tl.range(tl.program_id(0), tl.load(num_items) * GROUPS, tl.num_programs(0), num_stages=1):
        group = i % GROUPS
        item = verify_items + i // GROUPS
        row = tl.load(item)
        tile = tl.load(item + verify_capacity)
        split = tl.load(item + 2 * verify_capacity)
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

        q_at = (begin + token).to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        q_tile = tl.load(
            q + q_at[:, None] * D + column[None, :], mask=is_pair[:, None] & (column < D)[None, :], other=0.0
        ).to(DOT)
        last = tl.max(own, 0)
        oldest = first_visible(tl.min(tl.where(is_pair, own, last), 0), WINDOW)
        m, total, acc = attend_keys(
            q_tile,
            own,
            tl.maximum(split * SPLIT, oldest),
            tl.minimum((split + 1) * SPLIT, last + 1),
            tl.full([BLOCK_M], float("-inf"), ACC),
            tl.zeros([BLOCK_M], ACC),
            tl.zeros([BLOCK_M, BLOCK_DV], ACC),
            block_tables + row.to(tl.int64) * table_stride,
            k_cache + group * D,
            v_cache + group * DV,
            k_scale,
            GROUPS,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            BLOCK_SIZE,
            SCALE,
            SOFTCAP,
            WINDOW,
            True,
            DOT,
        )
        slot = (tl.load(row_slots + row) + split * query_len + token).to(tl.int64) * (GROUPS * HEADS) + head
        tl.store(part_m + slot, m, mask=is_pair)
        tl.store(part_l + slot, total, mask=is_pair)
        tl.store(
            part_acc + slot[:, None] * DV + value_column[None, :],
            acc * v_scale,
            mask=is_pair[:, None] & (value_column < DV)[None, :],
        )


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["seq_lens", "cu_query_lens", "part_m", "part_l"],
)
def merge_kernel(
    out,  # [T, H, DV]
    part_acc,
    part_m,
    part_l,
    sinks,  # [H] or unused
    seq_lens,
    cu_query_lens,
    token_rows,
    row_slots,
    num_rows,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # A program owns BLOCK_H heads of a query token: it adds their splits, BLOCK_S at a time, the oldest first.
    ACC: tl.constexpr = part_acc.dtype.element_ty
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_DV)
    is_head = head < H
    is_out = is_head[:, None] & (column < DV)[None, :]
    out_at = out + (token.to(tl.int64) * H + head)[:, None] * DV + column[None, :]
    if token < tl.load(cu_query_lens):
        return  # of a row before these
    row = tl.load(token_rows + token)
    if row == num_rows:
        tl.store(out_at, tl.zeros([BLOCK_H, BLOCK_DV], out.dtype.element_ty), mask=is_out)
        return
    begin = tl.load(cu_query_lens + row)
    query_len = tl.load(cu_query_lens + row + 1) - begin
    if query_len > MAX_VERIFY:
        return  # prefill wrote it
    position = tl.load(seq_lens + row) - query_len + token - begin
    first_split = first_visible(position, WINDOW) // SPLIT
    last_split = position // SPLIT
    slots = tl.load(row_slots + row) + token - begin
    m = tl.full([BLOCK_H], float("-inf"), ACC)
    total = tl.zeros([BLOCK_H], ACC)
    if HAS_SINKS:
        m = tl.load(sinks + head, mask=is_head, other=0.0).to(ACC) * tl.full([], LOG2_E, ACC)
        total = tl.full([BLOCK_H], 1.0, ACC)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], ACC)
    for start in tl.range(first_split // BLOCK_S * BLOCK_S, last_split + 1, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        is_seen = is_head[:, None] & ((split >= first_split) & (split <= last_split))[None, :]
        slot = (slots + split * query_len).to(tl.int64)[None, :] * H + head[:, None]
        part_max = tl.load(part_m + slot, mask=is_seen, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(part_max, 1))
        shift = finite_or_zero(m_new)
        kept = tl.exp2(m - shift)
        weight = tl.exp2(part_max - shift[:, None])
        total = total * kept + tl.sum(weight * tl.load(part_l + slot, mask=is_seen, other=0.0), 1)
        part = tl.load(
            part_acc + slot[:, :, None] * DV + column[None, None, :],
            mask=is_seen[:, :, None] & (column < DV)[None, None, :],
            other=0.0,
        )
        acc = acc * kept[:, None] + tl.sum(weight[:, :, None] * part, 1)
        m = m_new
    divisor = tl.where(is_head, total, 1.0)
    tl.store(out_at, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=is_out)
