"""The plain-PyTorch twin of `paged_attention`: one row after another, with the mask written out."""

import torch
from torch import Tensor


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """As the door; writes out [T, H, Dv]."""
    bounds = cu_query_lens.tolist()
    out[bounds[-1] :] = 0
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end:
            continue
        positions = torch.arange(seq_len, device=q.device)
        block_size = k_cache.shape[1]
        # Only blocks that are in use: what the table holds beyond them means nothing.
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        slots = blocks[positions // block_size] * block_size + positions % block_size
        own = positions[seq_len - (end - begin) :, None]
        is_visible = positions <= own
        if window is not None:
            is_visible &= positions > own - window
        # A key that no query sees may have lost its block.
        is_read = is_visible.any(0)
        keys = gathered(k_cache, slots[is_read])
        values = gathered(v_cache, slots[is_read])
        keys, values = widened(keys, k_scales, q.dtype), widened(values, v_scales, q.dtype)
        out[begin:end] = attend(q[begin:end], keys, values, is_visible[:, is_read], scale, softcap, sinks)


def gathered(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the vectors at `slots`; torch indexes fp8 only as bytes."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8).flatten(0, 1)[slots].view(cache.dtype)
    return cache.flatten(0, 1)[slots]


def widened(stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """stored [S, G, D], scales [G] -> the numbers they stand for: an fp8 cache holds value / scale."""
    if stored.dtype == torch.float8_e4m3fn:
        stored = stored.to(torch.promote_types(dtype, torch.float32))
    return stored if scales is None else stored * scales[:, None]


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    is_visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [N, H, D], keys [S, G, D], values [S, G, Dv], is_visible [N, S], sinks [H] -> [N, H, Dv]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1] // keys.shape[1]
    q, keys, values = (x.to(wide).transpose(0, 1) for x in (q, keys, values))
    scores = q @ keys.repeat_interleave(heads, 0).transpose(1, 2) * scale  # [H, N, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.repeat_interleave(heads, 0)).transpose(0, 1)
