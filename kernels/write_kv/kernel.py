"""Calls into native/write_kv.cpp."""

import torch
from torch import Tensor

from specdec.kernels import native


def write_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """As the twin; the last dimensions and slot_mapping are contiguous."""
    num_tokens, groups, k_width = k.shape
    k_size, v_size = k.element_size(), v.element_size()
    native.function("specdec_write_kv", "pppppiiiiiiiii")(
        k.data_ptr(),
        v.data_ptr(),
        slot_mapping.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_tokens,
        groups,
        k_width * k_size,
        v.shape[2] * v_size,
        k.stride(0) * k_size,
        k.stride(1) * k_size,
        v.stride(0) * v_size,
        v.stride(1) * v_size,
        torch.get_num_threads(),
    )
