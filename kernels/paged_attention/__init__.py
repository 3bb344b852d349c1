"""Causal attention over a paged cache: prompts, decode and verification in one ragged call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.kernels import dispatch, native
from specdec.kernels.paged_attention import kernel, reference
from specdec.kernels.paged_attention.step_lists import StepLists

if TYPE_CHECKING:
    from specdec.kernels.ahead_of_time import CompileCase

__all__ = ["StepLists", "compile_cases", "paged_attention"]

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_TRITON_WIDTH = 256


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    lists: StepLists | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """Attend from each row's newest tokens to all tokens of that row up to their own.

    q              [T, H, D]                         H a multiple of G; head h reads group h // (H // G)
    k_cache        [num_blocks, block_size, G, D]    this step's keys and values are already written
    v_cache        [num_blocks, block_size, G, Dv]
    block_tables   [B, P]                            int32
    seq_lens       [B]                               int32, tokens of a row including this step's
    cu_query_lens  [B + 1]                           int32, where a row's queries begin in T
    scale                                            multiplies q . k
    window                                           a token sees its newest `window` positions, its own included
    softcap                                          scores become softcap * tanh(score / softcap)
    sinks          [H]                               a logit per head that has no value (gpt-oss)
    k_scales       [G]                               float32; a cached key times its scale is the key (fp8 caches)
    v_scales       [G]
    lists                                            GPU work lists, shared by calls of the same lengths (one step)
    max_query_len                                    a bound, where the caller knows one; spares a GPU a launch
    returns        [T, H, Dv]                        of q's dtype; zero beyond cu_query_lens[-1]

    Sums are float32 (float64 stays float64). Native code gives a query the same bits in any batch; Triton gives them
    to the queries of rows that bring at most 65 (decode and verification).
    """
    assert q.ndim == 3 and k_cache.ndim == 4 and k_cache.shape[:3] == v_cache.shape[:3]
    assert q.shape[2] == k_cache.shape[3] and q.shape[1] % k_cache.shape[2] == 0
    assert block_tables.ndim == 2 and cu_query_lens.shape[0] == seq_lens.shape[0] + 1 == block_tables.shape[0] + 1
    assert (k_scales is None) == (v_scales is None)
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    if dispatch.wants_triton(q, _refusal(q, k_cache, v_cache)):
        from specdec.kernels.paged_attention import launch

        call = launch.Attention(
            q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, scale,
            window, softcap, sinks, k_scales, v_scales, out,
        )  # fmt: skip
        launch.attend(call, lists, max_query_len)
        return out
    known = q.dtype in kernel.DTYPES and k_cache.dtype in kernel.DTYPES and q.is_cpu and k_scales is None
    arguments = (q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, scale, window, softcap, sinks, out)
    if known and native.enabled():
        kernel.paged_attention(*arguments)
    else:
        reference.paged_attention(*arguments, k_scales, v_scales)
    return out


def compile_cases(space: bool = False) -> list[CompileCase]:
    """Return what must compile ahead of time: the defaults, and with `space` what a sweep may try."""
    from specdec.kernels.paged_attention.configurations import all_cases

    return all_cases(space)


def _refusal(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Say why the Triton engine cannot take these tensors."""
    width = max(k_cache.shape[3], v_cache.shape[3])
    if width > MOST_TRITON_WIDTH:
        return f"attention heads are {width} wide; the kernels hold at most {MOST_TRITON_WIDTH}"
    for name, x, known in (
        ("q", q, TRITON_DTYPES),
        ("k_cache", k_cache, (*TRITON_DTYPES, torch.float8_e4m3fn)),
    ):
        if x.dtype not in known:
            return f"{name} is {x.dtype}; attention kernels know {', '.join(map(str, known))}"
    if v_cache.dtype != k_cache.dtype:
        return f"v_cache is {v_cache.dtype} and k_cache {k_cache.dtype}; the kernels read both alike"
    return None
