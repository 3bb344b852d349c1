"""The plain-PyTorch twin of `write_kv`."""

import torch
from torch import Tensor

LARGEST_FP8 = 448.0  # of float8_e4m3fn


def write_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """k [T, G, D], v [T, G, Dv], slot_mapping [T] -> caches [num_blocks, block_size, G, D or Dv], in place."""
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept]
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        stored = x[is_kept] if scales is None else quantised(x[is_kept], scales)
        _numbers(cache)[slots] = _numbers(stored[:, None])


def quantised(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scale as float8_e4m3fn, held within its range: x [T, G, D], scales [G] -> [T, G, D]."""
    scaled = x.to(torch.float32) / scales[:, None]
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def _numbers(cache: Tensor) -> Tensor:
    """A cache, a slot a row; fp8 as bytes, since PyTorch does not index it."""
    flat = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return flat.flatten(0, 1)
