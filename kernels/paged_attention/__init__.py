"""Causal attention over a paged cache: prompts, decode and verification in one ragged call."""

from torch import Tensor

from specdec.kernels import native
from specdec.kernels.paged_attention import kernel, reference


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
    returns        [T, H, Dv]                        of q's dtype; zero beyond cu_query_lens[-1]

    Sums are float32 (float64 stays float64). Native code gives a query the same bits in any batch.
    """
    assert q.ndim == 3 and k_cache.ndim == 4 and k_cache.shape[:3] == v_cache.shape[:3]
    assert q.shape[2] == k_cache.shape[3] and q.shape[1] % k_cache.shape[2] == 0
    assert block_tables.ndim == 2 and cu_query_lens.shape[0] == seq_lens.shape[0] + 1 == block_tables.shape[0] + 1
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    known = q.dtype in kernel.DTYPES and k_cache.dtype in kernel.DTYPES and q.is_cpu
    implementation = kernel.paged_attention if known and native.enabled() else reference.paged_attention
    implementation(q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, scale, window, softcap, sinks, out)
    return out
