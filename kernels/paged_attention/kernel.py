"""Calls into native/attention.cpp."""

import ctypes
import functools

import torch
from torch import Tensor

from specdec.kernels import native

DTYPES = (torch.float32, torch.bfloat16)


@functools.lru_cache(maxsize=256)
def _shape(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """As the twin."""
    assert k_cache.dtype == v_cache.dtype and all(x.is_contiguous() for x in (k_cache, v_cache, out))
    assert block_tables.stride(1) == 1 and seq_lens.is_contiguous() and cu_query_lens.is_contiguous()
    assert block_tables.dtype == seq_lens.dtype == cu_query_lens.dtype == torch.int32
    q = q.contiguous()
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    shape = _shape(
        q.shape[1],
        *k_cache.shape[2:],
        v_cache.shape[3],
        k_cache.shape[1],
        block_tables.stride(0),
        window or 0,
        native.DTYPES[q.dtype],
        native.DTYPES[k_cache.dtype],
        native.DTYPES[out.dtype],
        int(native.has_tiles()),
    )
    native.function("specdec_paged_attention", "pppppppppiiffi")(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        cu_query_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        shape,
        q.shape[0],
        seq_lens.shape[0],
        scale,
        softcap or 0.0,
        torch.get_num_threads(),
    )
