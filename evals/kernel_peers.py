"""Other people's attention on the same numbers: SDPA, flex attention, flash-attn, flashinfer.

It knows how each wants to be called, and leaves out what is not installed. It measures nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Calls = dict[str, Callable[[], Any]]


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, context: int) -> Calls:
    """Calls of those that are here; rows of one length.

    q         [B * query_len, H, D]                 the last query_len positions of every row
    k_cache   [num_blocks, block_size, G, D]
    tables    [B, P]

    SDPA and flex attention read contiguous keys, copied beforehand: they are spared the paging.
    """
    batch = tables.shape[0]
    queries = q.view(batch, -1, *q.shape[1:])
    keys, values = (cache[tables.long()].flatten(1, 2)[:, :context] for cache in (k_cache, v_cache))
    calls = {"sdpa": _sdpa(queries, keys, values), "flex": _flex(queries, keys, values)}
    if importlib.util.find_spec("flash_attn"):
        calls["flash-attn"] = _flash_attn(queries, keys, values)
    if importlib.util.find_spec("flashinfer"):
        calls["flashinfer"] = _flashinfer(q, k_cache, v_cache, tables, context)
    return calls


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (x.transpose(1, 2).contiguous() for x in (queries, keys, values))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def _flex(queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.transpose(1, 2).contiguous() for x in (queries, keys, values))
    offset = k.shape[2] - q.shape[2]

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query + offset

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=str(q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _flash_attn(queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    k, v = keys.contiguous(), values.contiguous()
    lens = torch.full((len(k),), k.shape[1], dtype=torch.int32, device=k.device)
    return lambda: flash_attn_with_kvcache(queries, k, v, cache_seqlens=lens, causal=True)


def _flashinfer(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, context: int) -> Callable[[], Any]:
    import flashinfer  # type: ignore[import-not-found]

    batch, block_size = tables.shape[0], k_cache.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    last = torch.full((batch,), (context - 1) % block_size + 1, dtype=torch.int32, device=q.device)
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts * (len(q) // batch), starts * tables.shape[1], tables.flatten(), last,
        q.shape[1], k_cache.shape[2], q.shape[2], block_size, causal=True, q_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, (k_cache, v_cache))
