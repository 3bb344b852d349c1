"""The paged tensors of one model, and how many blocks fit the memory.

It knows shapes, dtypes and bytes. Which block holds what is the `BlockPool`'s business: the same
block id names the same token range in the target's tensors and in the draft's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from specdec.errors import InvalidRequestError

_ALIGNMENT = 64  # bytes; a cache line

FP8 = torch.float8_e4m3fn
Scales = list[tuple[Tensor, Tensor]]
"""Of each layer: float32 [G] for keys and for values; what an fp8 cache stores is the number over its head's scale."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token.

    num_kv_heads   G
    head_dim       D, width of a key
    value_dim      width of a value; equals D but for a few families
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class KVCache:
    """Keys and values of one model.

    keys[i]     [num_blocks, block_size, G, D]
    values[i]   [num_blocks, block_size, G, Dv]
    scales      of an FP8 cache; None where numbers are stored as they are
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scales: Scales | None = None,
    ) -> None:
        assert (dtype == FP8) == (scales is not None)
        self.scales = scales
        self.block_size = block_size
        self.num_blocks = num_blocks

        def new(num_heads: int, width: int) -> Tensor:
            return _zeros((num_blocks, block_size, num_heads, width), dtype, device)

        self.keys = [new(s.num_kv_heads, s.head_dim) for s in shapes]
        self.values = [new(s.num_kv_heads, s.value_dim) for s in shapes]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU, pages the system gives when they are first written, so that an unused cache takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(size + _ALIGNMENT, np.uint8))
    start = -pages.data_ptr() % _ALIGNMENT
    return pages[start : start + size].view(dtype).view(shape)


def bytes_per_token(shapes: list[LayerShape], dtype: torch.dtype) -> int:
    """Bytes one token takes in all layers of one model."""
    return sum(s.width for s in shapes) * dtype.itemsize


def free_memory(device: torch.device, share: float) -> int:
    """Bytes the cache may take by default.

    On CUDA: what is left of `share` of the card. On CPU: an eighth of the available memory, at
    most 4 GiB, because the machine is rarely ours alone.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - share) * total), 0)
    return min(int(psutil.virtual_memory().available) // 8, 4 * 2**30)


def count_blocks(memory: int, block_size: int, block_bytes: int) -> int:
    """Blocks of target and draft together that fit `memory` bytes: one division."""
    num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise InvalidRequestError(
            f"kv_cache_memory is {memory} bytes; one block of {block_size} tokens takes {block_bytes}",
            param="kv_cache_memory",
        )
    return int(num_blocks)
