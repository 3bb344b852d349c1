"""Placing keys and values in the paged cache."""

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.write_kv import kernel, reference


def write_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Place this step's keys and values in the paged cache, in place.

    k             [T, G, D]                         any strides, as long as D is contiguous
    v             [T, G, Dv]
    slot_mapping  [T]                               int64, block * block_size + offset; PAD_SLOT (-1) is skipped
    k_cache       [num_blocks, block_size, G, D]
    v_cache       [num_blocks, block_size, G, Dv]
    """
    assert k.ndim == 3 and k.shape[:2] == v.shape[:2] and slot_mapping.shape == k.shape[:1]
    assert k.shape[1:] == k_cache.shape[2:] and v.shape[1:] == v_cache.shape[2:]
    assert k.dtype == k_cache.dtype and v.dtype == v_cache.dtype and slot_mapping.dtype == torch.int64
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    on_cpu = k.is_cpu and k.stride(2) == 1 and v.stride(2) == 1 and slot_mapping.is_contiguous()
    implementation = kernel.write_kv if on_cpu and native.enabled() else reference.write_kv
    implementation(k, v, slot_mapping, k_cache, v_cache)
