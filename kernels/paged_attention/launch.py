"""The Triton engine of `paged_attention`: what it takes, its work lists and its three launches.

No value of a device tensor is read here, so a CUDA graph can hold all of it.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specdec.kernels.paged_attention import tiles
from specdec.kernels.paged_attention.prefill import prefill_kernel
from specdec.kernels.paged_attention.step_lists import StepLists, WorkLists
from specdec.kernels.paged_attention.tiles import SPLIT, HeadShape, Tile, padded
from specdec.kernels.paged_attention.verify import merge_kernel, verify_kernel
from specdec.kernels.paged_attention.work_list import MAX_VERIFY_LEN, make_work_lists, most_splits

MOST_WORKSPACE = 256 * 2**20  # bytes of partial sums; above, rows take turns
TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of one call, as the door got them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    out: Tensor


def attend(call: Attention, lists: StepLists | None = None, max_query_len: int | None = None) -> None:
    """Write call.out; as the door. ValueError where a tensor does not lie as the kernels address it."""
    check(call)
    num_rows, num_tokens = call.seq_lens.shape[0], call.q.shape[0]
    if not num_tokens:
        return
    if not num_rows:
        call.out.zero_()
        return
    step = rows_per_turn(call)
    for first in range(0, num_rows, step):
        if step < num_rows:
            turn, lists = _rows(call, first, first + step), None
        else:
            turn = call
        _attend_rows(turn, lists, max_query_len)


def check(call: Attention) -> None:
    """Refuse what the kernels would read wrongly, by name."""
    for name in ("block_tables", "seq_lens", "cu_query_lens"):
        if (x := getattr(call, name)).dtype != torch.int32 or x.stride(-1) != 1:
            raise ValueError(f"{name} is {x.dtype} with stride {x.stride(-1)}; it must be int32, its last stride 1")
    for name in ("k_cache", "v_cache", "out"):
        if not getattr(call, name).is_contiguous():
            raise ValueError(f"{name} has strides {getattr(call, name).stride()}; it must be contiguous")
    groups, heads = call.k_cache.shape[2], call.q.shape[1]
    for name, x, length in (
        ("sinks", call.sinks, heads),
        ("k_scales", call.k_scales, groups),
        ("v_scales", call.v_scales, groups),
    ):
        if x is not None and (x.shape != (length,) or x.stride(0) != 1):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {length} numbers side by side")
    for name in ("k_cache", "v_cache", "block_tables", "seq_lens", "cu_query_lens", "sinks", "k_scales", "v_scales"):
        if (x := getattr(call, name)) is not None and x.device != call.q.device:
            raise ValueError(f"{name} is on {x.device} and q on {call.q.device}; they must be on one device")


def rows_per_turn(call: Attention) -> int:
    """Return how many rows may run at once for their partial sums to stay within MOST_WORKSPACE."""
    positions = call.block_tables.shape[1] * call.k_cache.shape[1]
    splits = most_splits(positions, SPLIT, call.window or 0)
    slot_bytes = call.q.shape[1] * (call.v_cache.shape[3] + 2) * _accumulator(call).itemsize
    num_rows = call.seq_lens.shape[0]
    if min(call.q.shape[0], num_rows * MAX_VERIFY_LEN) * splits * slot_bytes <= MOST_WORKSPACE:
        return num_rows
    return max(1, MOST_WORKSPACE // (MAX_VERIFY_LEN * splits * slot_bytes))


def _rows(call: Attention, first: int, end: int) -> Attention:
    return replace(
        call,
        block_tables=call.block_tables[first:end],
        seq_lens=call.seq_lens[first:end],
        cu_query_lens=call.cu_query_lens[first : end + 1],
    )


def dot_dtype(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """Return the dtype that is multiplied: a cache of bytes (fp8) is widened to q's."""
    return q if cache.itemsize == 1 else torch.promote_types(q, cache)


def _accumulator(call: Attention) -> torch.dtype:
    return torch.float64 if dot_dtype(call.q.dtype, call.k_cache.dtype) == torch.float64 else torch.float32


def head_shape(call: Attention) -> HeadShape:
    """Return what tiles are chosen by."""
    groups, head_dim = call.k_cache.shape[2:]
    item_bytes = dot_dtype(call.q.dtype, call.k_cache.dtype).itemsize
    shape = HeadShape(call.q.shape[1] // groups, head_dim, call.v_cache.shape[3], item_bytes)
    if call.k_cache.dtype != torch.float8_e4m3fn:
        return shape
    return replace(shape, fp8="converted" if _has_fp8(call.k_cache.device) else "decoded")


def _attend_rows(call: Attention, lists: StepLists | None, max_query_len: int | None) -> None:
    shape = head_shape(call)
    verify, prefill = tiles.verify_tile(shape), tiles.prefill_tile(shape)
    constants = {
        "HEADS": shape.heads,
        "VERIFY_M": verify.block_m,
        "PREFILL_M": prefill.block_m,
        "SPLIT": SPLIT,
        "WINDOW": call.window or 0,
    }
    work = _work_lists(call, constants, lists)
    caches = _readable(call.k_cache), _readable(call.v_cache)
    q = call.q if _is_strided(call.q) else call.q.contiguous()
    _verify(replace(call, q=q, k_cache=caches[0], v_cache=caches[1]), work, shape, verify)
    may_be_long = max_query_len is None or max_query_len > MAX_VERIFY_LEN
    if work.prefill_items.shape[1] and may_be_long:
        _prefill(replace(call, q=q, k_cache=caches[0], v_cache=caches[1]), work, shape, prefill)


def _work_lists(call: Attention, constants: dict[str, int], lists: StepLists | None) -> WorkLists:
    num_positions = call.block_tables.shape[1] * call.k_cache.shape[1]
    made = {} if lists is None else lists.made
    key = (*constants.values(), num_positions)
    if key not in made:
        made[key] = make_work_lists(call.seq_lens, call.cu_query_lens, call.q.shape[0], num_positions, constants)
    return made[key]


def _is_strided(q: Tensor) -> bool:
    """True where kernels can address q as it lies: heads of D numbers, at multiples of D."""
    width = q.shape[2]
    return q.stride(2) == 1 and q.stride(0) % width == 0 and q.stride(1) % width == 0


def _readable(cache: Tensor) -> Tensor:
    """Return an fp8 cache as bytes where the device has no conversion of its own; others as they are."""
    if cache.dtype != torch.float8_e4m3fn or _has_fp8(cache.device):
        return cache
    return cache.view(torch.uint8)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    """True for CUDA devices that convert e4m3 in hardware; elsewhere the kernels decode the bytes themselves."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _num_programs(device: torch.device) -> int:
    """Return how many programs walk over a list; on a CPU (the interpreter) few, as they run one after another."""
    if device.type != "cuda":
        return 2
    return PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _constants(call: Attention, shape: HeadShape, tile: Tile) -> dict[str, Any]:
    """Return the compile-time arguments that both attention kernels take."""
    return {
        "HEADS": shape.heads,
        "GROUPS": call.k_cache.shape[2],
        "D": shape.head_dim,
        "DV": shape.value_dim,
        "BLOCK_D": padded(shape.head_dim),
        "BLOCK_DV": padded(shape.value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_SIZE": call.k_cache.shape[1],
        "SCALE": float(call.scale),
        "SOFTCAP": float(call.softcap or 0.0),
        "WINDOW": call.window or 0,
        "HAS_SCALES": call.k_scales is not None,
        "DOT": TL_DTYPES[dot_dtype(call.q.dtype, call.k_cache.dtype)],
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _verify(call: Attention, work: WorkLists, shape: HeadShape, tile: Tile) -> None:
    num_tokens, num_heads = call.q.shape[:2]
    width = shape.value_dim
    part = call.q.new_empty(work.num_slots * num_heads * (width + 2), dtype=_accumulator(call))
    part_acc, part_m, part_l = part.split([work.num_slots * num_heads * n for n in (width, 1, 1)])
    capacity = work.verify_items.shape[1]
    num_programs = min(capacity * call.k_cache.shape[2], _num_programs(call.q.device))
    verify_kernel[(num_programs,)](
        call.q, call.k_cache, call.v_cache, _or(call.k_scales, part), _or(call.v_scales, part),
        call.block_tables, call.seq_lens, call.cu_query_lens,
        work.verify_items, work.num_items, work.row_slots, part_acc, part_m, part_l,
        call.block_tables.stride(0), call.q.stride(0) // shape.head_dim, call.q.stride(1) // shape.head_dim, capacity,
        SPLIT=SPLIT, **_constants(call, shape, tile),
    )  # fmt: skip
    block_h = tiles.merge_heads(num_heads, width, part.itemsize)
    merge_kernel[(num_tokens, -(-num_heads // block_h))](
        call.out, part_acc, part_m, part_l, _or(call.sinks, part), call.seq_lens, call.cu_query_lens,
        work.token_rows, work.row_slots, call.seq_lens.shape[0],
        H=num_heads, DV=width, BLOCK_H=block_h, BLOCK_DV=padded(width), SPLIT=SPLIT, WINDOW=call.window or 0,
        MAX_VERIFY=MAX_VERIFY_LEN, HAS_SINKS=call.sinks is not None, BLOCK_S=tiles.MERGE_SPLITS,
        num_warps=4,
    )  # fmt: skip


def _prefill(call: Attention, work: WorkLists, shape: HeadShape, tile: Tile) -> None:
    capacity = work.prefill_items.shape[1]
    unused = call.out
    num_programs = min(capacity * call.k_cache.shape[2], _num_programs(call.q.device))
    prefill_kernel[(num_programs,)](
        call.out, call.q, call.k_cache, call.v_cache, _or(call.k_scales, unused), _or(call.v_scales, unused),
        _or(call.sinks, unused), call.block_tables, call.seq_lens, call.cu_query_lens,
        work.prefill_items, work.num_items,
        call.block_tables.stride(0), call.q.stride(0) // shape.head_dim, call.q.stride(1) // shape.head_dim, capacity,
        HAS_SINKS=call.sinks is not None, ACC=TL_DTYPES[_accumulator(call)], **_constants(call, shape, tile),
    )  # fmt: skip


def _or(x: Tensor | None, unused: Tensor) -> Tensor:
    """Return a pointer to pass where there is no tensor; the kernel never follows it."""
    return unused if x is None else x
