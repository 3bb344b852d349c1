"""The plain-PyTorch twin of the head, made of the doors of its parts: what runs in float64 and on accelerators."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.eagle_forward.weights import EagleWeights
from specdec.kernels.elementwise import reference as elementwise
from specdec.kernels.paged_attention import paged_attention

if TYPE_CHECKING:
    from specdec.kernels.eagle_forward import Pairs

Cache = tuple[Tensor, Tensor]


@torch.no_grad()
def fuse(model: EagleWeights, streams: Tensor) -> Tensor:
    """As the door."""
    wide = _wide(model)
    streams = streams.to(wide)
    if model.feature_norm is not None:
        parts = streams.unflatten(1, (model.num_feature_norms, -1))
        weight = model.feature_norm.to(wide).view(model.num_feature_norms, -1)
        streams = torch.cat(
            [elementwise.rms_norm(part, w, model.shape.eps) for part, w in zip(parts.unbind(1), weight)], dim=1
        )
    return F.linear(streams, model.fc.to(wide), None if model.fc_bias is None else model.fc_bias.to(wide))


@torch.no_grad()
def keep(model: EagleWeights, pairs: "Pairs", slot_mapping: Tensor, cache: Cache) -> None:
    """As the door."""
    _, _, k, v = _project(model, pairs.token_ids, pairs.features.to(_wide(model)), pairs.positions)
    _write(k, v, slot_mapping, cache)


@torch.no_grad()
def draft(
    model: EagleWeights,
    pairs: "Pairs",
    block_tables: Tensor,
    num_active: list[int],
    cache: Cache,
    wants_logits: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As the door."""
    features = pairs.features.to(_wide(model)).clone()
    tokens, size = pairs.token_ids, cache[0].shape[1]
    token_ids = tokens.new_full((len(tokens), len(num_active)), -1)
    confidences = features.new_zeros(len(tokens), len(num_active))
    logits = None
    for s, n in enumerate(num_active):
        positions = pairs.positions[:n] + s
        tables = block_tables[:n].long()
        blocks = tables.gather(1, (positions // size)[:, None])[:, 0]
        residual, q, k, v = _project(model, tokens[:n], features[:n], positions)
        _write(k, v, blocks * size + positions % size, cache)
        hidden = residual + _attend(model, q, positions, tables, cache)
        features[:n], logits = _score(model, hidden)
        best = logits.argmax(1)
        confidences[:n, s] = logits.softmax(1).gather(1, best[:, None])[:, 0]
        tokens = token_ids[:n, s] = model.target_ids.to(best.device)[best]
    return token_ids, confidences, logits if wants_logits else None, features


def _wide(model: EagleWeights) -> torch.dtype:
    return torch.promote_types(model.fc.dtype, torch.float32)


def _project(
    model: EagleWeights, token_ids: Tensor, features: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """features [N, width] -> what attention is added to, and queries, keys and values, turned."""
    shape, layer, wide = model.shape, model.layer, features.dtype
    embedded = F.embedding(token_ids, model.embedding).to(wide)
    e = elementwise.rms_norm(embedded, layer.input_norm.to(wide), shape.eps)
    c = elementwise.rms_norm(features, model.hidden_norm.to(wide), shape.eps)
    qkv = F.linear(
        torch.cat([e, c], 1), layer.qkv.to(wide), None if layer.qkv_bias is None else layer.qkv_bias.to(wide)
    )
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.tensor_split((shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = elementwise.rms_norm(q, layer.q_norm.to(wide), shape.eps)
        k = elementwise.rms_norm(k, layer.k_norm.to(wide), shape.eps)
    elementwise.rotary(q, k, model.cos[positions - 1].to(wide), model.sin[positions - 1].to(wide))
    return c if model.is_residual_normed else features, q, k, v


def _write(k: Tensor, v: Tensor, slots: Tensor, cache: Cache) -> None:
    for rows, kept in zip((k, v), cache):
        kept.flatten(0, 1)[slots] = rows.to(kept.dtype)


def _attend(model: EagleWeights, q: Tensor, positions: Tensor, block_tables: Tensor, cache: Cache) -> Tensor:
    """One query a row, over positions 1 and later: tables of single slots leave position 0 out."""
    size = cache[0].shape[1]
    slots = (block_tables[:, :, None] * size + torch.arange(size, device=q.device)).flatten(1)[:, 1:]
    k_slots, v_slots = (kept.flatten(0, 1)[:, None] for kept in cache)
    bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    tables, lens = slots.to(torch.int32).contiguous(), positions.to(torch.int32)
    mixed = paged_attention(
        q.contiguous(), k_slots, v_slots, tables, lens, bounds, model.shape.scale, model.layer.window
    )
    bias = model.layer.out_bias
    return F.linear(mixed.flatten(1), model.layer.out.to(q.dtype), None if bias is None else bias.to(q.dtype))


def _score(model: EagleWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [N, width], attention added -> the feature of the next draft [N, width] and scores [N, Vd]."""
    layer, wide = model.layer, hidden.dtype
    x = elementwise.rms_norm(hidden, layer.post_norm.to(wide), model.shape.eps)
    gate_up = F.linear(x, torch.cat([layer.gate, layer.up]).to(wide))
    hidden = hidden + F.linear(elementwise.silu_mul(gate_up), layer.down.to(wide))
    last = elementwise.rms_norm(hidden, model.norm.to(wide), model.shape.eps)
    return last if model.is_feedback_normed else hidden, F.linear(last, model.head.to(wide))
