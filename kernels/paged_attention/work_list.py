"""Which tiles of which rows a step has to compute, found on the device: a captured graph replays for other lengths.

Knows lengths and tile sizes; no head widths, dtypes or caches. One program a row counts what the rows before it own
and writes its own part of the lists; nothing is read back, so the capacities are bounds from shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.paged_attention.step_lists import WorkLists
from specdec.kernels.paged_attention.tile import first_visible

MAX_VERIFY_LEN = 65  # query tokens of a row that verification takes: K up to 64; longer ones are prompt chunks
CHUNK = 256


@triton.jit
def _row_counts(
    row,
    num_rows,
    seq_lens,
    cu_query_lens,
    HEADS: tl.constexpr,
    VERIFY_M: tl.constexpr,
    PREFILL_M: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
):
    """Return of rows [N]: tiles and splits of verification, first split, query length, tiles of prefill."""
    is_row = row < num_rows
    seq_len = tl.load(seq_lens + row, mask=is_row, other=0)
    query_len = tl.load(cu_query_lens + row + 1, mask=is_row, other=0) - tl.load(
        cu_query_lens + row, mask=is_row, other=0
    )
    is_verify = (query_len > 0) & (query_len <= MAX_VERIFY)
    first_split = first_visible(seq_len - query_len, WINDOW) // SPLIT
    num_splits = tl.where(is_verify, (seq_len + SPLIT - 1) // SPLIT - first_split, 0)
    num_tiles = tl.where(is_verify, (query_len * HEADS + VERIFY_M - 1) // VERIFY_M, 0)
    prefill_tiles = tl.where(query_len > MAX_VERIFY, (query_len * HEADS + PREFILL_M - 1) // PREFILL_M, 0)
    return num_tiles, num_splits, first_split, query_len, prefill_tiles


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "verify_capacity", "prefill_capacity"],
    do_not_specialize_on_alignment=["seq_lens", "cu_query_lens"],
)
def work_list_kernel(
    seq_lens,
    cu_query_lens,
    verify_items,
    prefill_items,
    num_items,
    token_rows,
    row_slots,
    num_rows,
    num_tokens,
    verify_capacity,
    prefill_capacity,
    HEADS: tl.constexpr,
    VERIFY_M: tl.constexpr,
    PREFILL_M: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program owns one row's part of the lists; the program after the last row owns the totals and the padding.
    own = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    verify_at = 0
    prefill_at = 0
    slots = 0
    for start in range(0, own, CHUNK):
        row = start + lane
        tiles, splits, first, query_len, prefill_tiles = _row_counts(
            row, own, seq_lens, cu_query_lens, HEADS, VERIFY_M, PREFILL_M, SPLIT, WINDOW, MAX_VERIFY
        )
        verify_at += tl.sum(tiles * splits)
        prefill_at += tl.sum(prefill_tiles)
        slots += tl.sum(splits * query_len)
    if own == num_rows:
        tl.store(num_items, verify_at)
        tl.store(num_items + 1, prefill_at)
        for start in range(tl.load(cu_query_lens + num_rows), num_tokens, CHUNK):
            tl.store(token_rows + start + lane, own, mask=start + lane < num_tokens)
    else:
        tiles, splits, first, query_len, prefill_tiles = _row_counts(
            own, num_rows, seq_lens, cu_query_lens, HEADS, VERIFY_M, PREFILL_M, SPLIT, WINDOW, MAX_VERIFY
        )
        tl.store(row_slots + own, slots - first * query_len)
        # Tiles fastest: neighbours read the same keys.
        for start in range(0, tiles * splits, CHUNK):
            i = start + lane
            is_item = i < tiles * splits
            at = verify_items + verify_at + i
            tl.store(at, own, mask=is_item)
            tl.store(at + verify_capacity, i % tiles, mask=is_item)
            tl.store(at + 2 * verify_capacity, first + i // tiles, mask=is_item)
        for start in range(0, prefill_tiles, CHUNK):
            i = start + lane
            # The last tile of a chunk sees the most keys and comes first.
            tl.store(prefill_items + prefill_at + i, own, mask=i < prefill_tiles)
            tl.store(prefill_items + prefill_capacity + prefill_at + i, prefill_tiles - 1 - i, mask=i < prefill_tiles)
        begin = tl.load(cu_query_lens + own)
        for start in range(0, query_len, CHUNK):
            tl.store(token_rows + begin + start + lane, own, mask=start + lane < query_len)


def most_splits(num_positions: int, split: int, window: int) -> int:
    """Bound the splits that one row of verification reads."""
    full = -(-num_positions // split)
    return min(full, -(-(window + MAX_VERIFY_LEN) // split) + 1) if window else full


def make_work_lists(
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    num_tokens: int,
    num_positions: int,
    constants: dict[str, int],
) -> WorkLists:
    """Launch the kernel that fills the lists.

    num_positions   most tokens a row may have: what its block table covers
    constants       HEADS, VERIFY_M, PREFILL_M, SPLIT, WINDOW
    """
    num_rows = seq_lens.shape[0]
    splits = most_splits(num_positions, constants["SPLIT"], constants["WINDOW"])
    pairs = num_tokens * constants["HEADS"]
    num_prefill_rows = num_tokens // (MAX_VERIFY_LEN + 1)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=seq_lens.device)

    lists = WorkLists(
        verify_items=new(3, (pairs // constants["VERIFY_M"] + min(num_rows, num_tokens)) * splits),
        prefill_items=new(2, pairs // constants["PREFILL_M"] + num_prefill_rows if num_prefill_rows else 0),
        num_items=new(2),
        token_rows=new(num_tokens),
        row_slots=new(num_rows),
        num_slots=min(num_tokens, num_rows * MAX_VERIFY_LEN) * splits,
    )
    work_list_kernel[(num_rows + 1,)](
        seq_lens,
        cu_query_lens,
        lists.verify_items,
        lists.prefill_items,
        lists.num_items,
        lists.token_rows,
        lists.row_slots,
        num_rows,
        num_tokens,
        lists.verify_items.shape[1],
        lists.prefill_items.shape[1],
        **constants,
        MAX_VERIFY=MAX_VERIFY_LEN,
        CHUNK=CHUNK,
    )
    return lists
