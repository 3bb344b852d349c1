"""The configurations of the attention kernels that must compile: every head width and dtype the door accepts.

Knows the kernels' parameters and how the launcher chooses; the launcher's own functions decide tiles here too.
"""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from specdec.kernels.ahead_of_time import TARGETS, CompileCase
from specdec.kernels.paged_attention import tiles
from specdec.kernels.paged_attention.prefill import prefill_kernel
from specdec.kernels.paged_attention.tiles import HeadShape, Tile, padded
from specdec.kernels.paged_attention.verify import merge_kernel, verify_kernel
from specdec.kernels.paged_attention.work_list import CHUNK, MAX_VERIFY_LEN, work_list_kernel

WIDTHS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
# Query dtype, cache dtype, what is multiplied, where it must compile.
_ALIKE = (("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", tl.float32), ("fp64", tl.float64))
DTYPES = (
    *((name, name, dot, TARGETS) for name, dot in _ALIKE),
    *((name, "u8", dot, ("sm_80", "gfx942")) for name, dot in _ALIKE[:3]),
    *((name, "fp8e4nv", dot, ("sm_90",)) for name, dot in _ALIKE[:3]),
)
OPTIONS: tuple[dict[str, Any], ...] = ({"WINDOW": 1024}, {"SOFTCAP": 50.0}, {"HAS_SINKS": True, "WINDOW": 128})
BLOCK_SIZES = (8, 32, 64, 128, 256)
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
_FP8: dict[str, Any] = {"u8": "decoded", "fp8e4nv": "converted"}
_UNALIGNED = ("block_tables", "seq_lens", "cu_query_lens", "part_m", "part_l")


def all_cases(space: bool = False) -> list[CompileCase]:
    """Return the cases of the defaults; with `space`, those of the search space as well, which bfloat16 stands for."""
    cases = [_work_list()]
    for head_dim, value_dim in WIDTHS:
        for kinds in DTYPES:
            shape = HeadShape(4, head_dim, value_dim, _BYTES[kinds[0]], _FP8.get(kinds[1], ""))
            cases += _both(shape, kinds, {}, space and kinds[0] == "bf16")
    for heads in (1, 3, 8, 16, 71):
        cases += _both(HeadShape(heads, 64, 64, 2), DTYPES[0], {}, False)
    usual = HeadShape(4, 128, 128, 2)
    for options in (*OPTIONS, *({"BLOCK_SIZE": size} for size in BLOCK_SIZES)):
        cases += _both(usual, DTYPES[0], options, False)
    return cases


def _both(shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any], space: bool) -> Iterator[CompileCase]:
    for make, tile in ((_verify, tiles.verify_tile(shape)), (_prefill, tiles.prefill_tile(shape))):
        yield make(shape, kinds, options, tile, True)
        if space:
            yield from (make(shape, kinds, options, other, False) for other in tiles.search_space(tile))
    # Only values are merged, in windows and with sinks; neither blocks nor soft caps are seen.
    is_usual = kinds[0] == kinds[1] and shape.heads == 4 and shape.head_dim == shape.value_dim
    if is_usual and "BLOCK_SIZE" not in options and "SOFTCAP" not in options:
        yield _merge(shape, kinds, options)


def _name(op: str, shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any], tried: Tile | None = None) -> str:
    """What is special about a case; of one that a sweep tries, its tile too."""
    width = f"d{shape.head_dim}" + (f"/{shape.value_dim}" if shape.value_dim != shape.head_dim else "")
    cache = "" if kinds[0] == kinds[1] else f" {kinds[1]} cache"
    extra = "".join(f" {name.lower()}={value}" for name, value in options.items())
    tile = "" if tried is None else f" tile {tried.block_n}/{tried.num_warps}/{tried.num_stages}"
    return f"{op} {width} x{shape.heads} {kinds[0]}{cache}{extra}{tile}"


def _constants(shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any], tile: Tile) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "GROUPS": 8,
        "D": shape.head_dim,
        "DV": shape.value_dim,
        "BLOCK_D": padded(shape.head_dim),
        "BLOCK_DV": padded(shape.value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_SIZE": options.get("BLOCK_SIZE", 16),
        "SCALE": shape.head_dim**-0.5,
        "SOFTCAP": options.get("SOFTCAP", 0.0),
        "WINDOW": options.get("WINDOW", 0),
        "HAS_SCALES": kinds[1] in ("u8", "fp8e4nv"),
        "DOT": kinds[2],
    }


def _case(name: str, fn: Any, kinds: dict[str, str], constants: dict[str, Any], **fields: Any) -> CompileCase:
    """Fill a signature: what `kinds` does not name is int32, a pointer where its name is not a number's."""
    signature = {
        parameter: "constexpr" if parameter in constants else kinds.get(parameter, "*i32") for parameter in fn.arg_names
    }
    return CompileCase(name, fn, signature, constants, unaligned=_UNALIGNED, **fields)


_NUMBERS = dict.fromkeys(
    (
        "table_stride",
        "q_token_stride",
        "q_head_stride",
        "verify_capacity",
        "prefill_capacity",
        "num_rows",
        "num_tokens",
    ),
    "i32",
)


def _verify(
    shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any], tile: Tile, is_default: bool
) -> CompileCase:
    constants = {**_constants(shape, kinds, options, tile), "SPLIT": tiles.SPLIT}
    pointers = {"q": f"*{kinds[0]}", "k_cache": f"*{kinds[1]}", "v_cache": f"*{kinds[1]}"}
    pointers |= {**dict.fromkeys(("k_scales", "v_scales"), "*fp32"), **_parts(kinds)}
    return _case(
        _name("verify_attention", shape, kinds, options, None if is_default else tile),
        verify_kernel, {**_NUMBERS, **pointers}, constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages, targets=kinds[3], is_default=is_default,
    )  # fmt: skip


def _parts(kinds: tuple[Any, ...]) -> dict[str, str]:
    return dict.fromkeys(("part_acc", "part_m", "part_l"), "*fp64" if kinds[0] == "fp64" else "*fp32")


def _prefill(
    shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any], tile: Tile, is_default: bool
) -> CompileCase:
    constants = {
        **_constants(shape, kinds, options, tile),
        "HAS_SINKS": options.get("HAS_SINKS", False),
        "ACC": tl.float64 if kinds[0] == "fp64" else tl.float32,
    }
    pointers = {"q": f"*{kinds[0]}", "out": f"*{kinds[0]}", "k_cache": f"*{kinds[1]}", "v_cache": f"*{kinds[1]}"}
    pointers |= dict.fromkeys(("k_scales", "v_scales", "sinks"), "*fp32")
    return _case(
        _name("prefill_attention", shape, kinds, options, None if is_default else tile),
        prefill_kernel, {**_NUMBERS, **pointers}, constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages, targets=kinds[3], is_default=is_default,
    )  # fmt: skip


def _merge(shape: HeadShape, kinds: tuple[Any, ...], options: dict[str, Any]) -> CompileCase:
    num_heads = shape.heads * 8
    constants = {
        "H": num_heads,
        "DV": shape.value_dim,
        "BLOCK_H": tiles.merge_heads(num_heads, shape.value_dim, 8 if kinds[0] == "fp64" else 4),
        "BLOCK_DV": padded(shape.value_dim),
        "SPLIT": tiles.SPLIT,
        "WINDOW": options.get("WINDOW", 0),
        "MAX_VERIFY": MAX_VERIFY_LEN,
        "HAS_SINKS": options.get("HAS_SINKS", False),
        "BLOCK_S": tiles.MERGE_SPLITS,
    }
    pointers = {"out": f"*{kinds[0]}", "sinks": "*fp32", **_parts(kinds)}
    name = _name("verify_attention merge", shape, kinds, options)
    return _case(name, merge_kernel, {**_NUMBERS, **pointers}, constants, targets=kinds[3])


def _work_list() -> CompileCase:
    shape = HeadShape(4, 128, 128, 2)
    constants = {
        "HEADS": shape.heads,
        "VERIFY_M": tiles.verify_tile(shape).block_m,
        "PREFILL_M": tiles.prefill_tile(shape).block_m,
        "SPLIT": tiles.SPLIT,
        "WINDOW": 0,
        "MAX_VERIFY": MAX_VERIFY_LEN,
        "CHUNK": CHUNK,
    }
    return _case("attention work list", work_list_kernel, _NUMBERS, constants)
