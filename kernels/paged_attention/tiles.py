"""How large the tiles are: one choice per head shape and dtype, never per batch or number of drafts.

Plain numbers, no Triton: the launcher, the compile table and the roofline read them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

SPLIT = 512  # positions of a context that one program of verification reads; part of what the bits depend on
MERGE_SPLITS = 8  # splits that are added at a time; part of what the bits depend on
FAVOURED_LEN = 5  # query tokens a tile of verification holds at least, where registers allow


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel of one model is compiled for.

    heads        query heads of one KV group
    item_bytes   of the numbers that are multiplied: 2, 4 or 8
    fp8          an e4m3 cache is "decoded" by the kernel itself or "converted" by the device; both take registers
    """

    heads: int
    head_dim: int
    value_dim: int
    item_bytes: int
    fp8: Literal["", "decoded", "converted"] = ""

    @property
    def width(self) -> int:
        """The wider of both vectors, as tiles hold it."""
        return max(padded(self.head_dim), padded(self.value_dim))


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m pairs of query token and head against block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(width: int) -> int:
    """Return the power of two, at least 16, that holds `width`: what a matrix unit multiplies."""
    return max(16, 1 << (width - 1).bit_length())


def _widened(shape: HeadShape) -> Tile:
    """Of e4m3 that becomes float32 or float64, which takes registers at any width."""
    return Tile(16, 16, num_warps=4 if shape.width <= 32 else 8, num_stages=2 if shape.width <= 128 else 1)


def verify_tile(shape: HeadShape) -> Tile:
    """Return the tile of verification: FAVOURED_LEN tokens of all heads of a group, so that keys are read once.

    Registers bound it; the compile table (`python -m evals.kernels --compile-only`) shows that none spill.
    """
    if shape.item_bytes > 2 and shape.fp8:
        return _widened(shape)
    is_half = shape.item_bytes <= 2
    most_numbers = 16384 if is_half else 65536 // shape.item_bytes**2
    block_m = max(16, min(padded(shape.heads * FAVOURED_LEN), 64, most_numbers // shape.width))
    block_n = max(16, min(64, 8192 // shape.width) if is_half else min(128 // shape.item_bytes, 2048 // shape.width))
    return Tile(block_m, block_n, num_warps=8 if block_m * shape.width > 8192 else 4, num_stages=2)


def merge_heads(num_heads: int, value_dim: int, acc_bytes: int = 4) -> int:
    """Return how many heads one program of the merge takes: what its registers hold of MERGE_SPLITS parts."""
    most = max(1, 16384 // (MERGE_SPLITS * padded(value_dim) * acc_bytes))
    return int(min(most, 1 << (num_heads - 1).bit_length()))


def prefill_tile(shape: HeadShape) -> Tile:
    """Return the tile of a prompt chunk: as many pairs as registers allow."""
    if shape.item_bytes <= 2 and shape.fp8 == "decoded":
        return Tile(64, 32 if shape.width <= 128 else 16, num_warps=4 if shape.width <= 64 else 8, num_stages=2)
    if shape.item_bytes <= 2:
        block_m, block_n = 128 if shape.width <= 128 else 64, 64 if shape.width <= 64 else 32
        num_stages = 1 if shape.fp8 and shape.width > 128 else 2
        return Tile(block_m, block_n, 4 if shape.width <= 32 else 8, num_stages)
    if shape.fp8:
        return _widened(shape)
    block_m = max(16, min(32, 4096 // shape.width))
    return Tile(block_m, max(16, min(32, 2048 // shape.width)), num_warps=4, num_stages=1)


def search_space(default: Tile) -> Iterator[Tile]:
    """Yield what a sweep on a GPU may try instead of the default: its neighbours, one number changed at a time.

    block_m stays, so that a sweep changes no list; registers are full already, so that block_n does not grow and
    warps do not get fewer.
    """
    if default.block_n >= 32:
        yield replace(default, block_n=default.block_n // 2)
    if default.num_warps < 8:
        yield replace(default, num_warps=8)
    for num_stages in (1, 2, 3):
        if num_stages != default.num_stages:
            yield replace(default, num_stages=num_stages)
