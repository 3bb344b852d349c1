"""Eagle3Head: one decoder layer over target features, unrolled over its own outputs as it will be when it drafts.

It knows the forward of fact sheet 3.3 and the training-time test of 12.2. It does not know files, data or
optimisers. Tensor names are those of the SafeAILab layout, so that its state dict is the checkpoint.
Dimensions: B examples, T tokens, R rows that predict, H width, Vd draft vocabulary, S steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shapes of a head; the names are those of a Llama config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    num_features: int = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """Padded examples and the rows of them that predict.

    ids        [B, T]      padded with 0
    features   [B, T, F * H]   entry features, as many as were stored or as a head reads
    first      [B]         first predicting row: the one that holds the first answer token
    num_rows   [B]         rows from there whose successor's successor exists
    """

    ids: Tensor
    features: Tensor
    first: Tensor
    num_rows: Tensor

    @property
    def widest(self) -> int:
        """R: the most rows of one example."""
        return int(self.num_rows.max())

    def index(self, shift: int = 0) -> Tensor:
        """[B, R] positions of the predicting rows, moved right by `shift` and kept inside the example."""
        steps = torch.arange(self.widest, device=self.ids.device)
        return (self.first[:, None] + steps + shift).clamp_max(self.ids.shape[1] - 1)

    def valid(self, step: int) -> Tensor:
        """[B, R] whether row r still has a token to predict at unrolled step `step`."""
        return torch.arange(self.widest, device=self.ids.device) < (self.num_rows - step)[:, None]


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Midlayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """The trainable head; the target's embedding is handed to the forward and never its own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Midlayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def forward(self, rows: Rows, embedding: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield the pre-norm outputs [B, R, H] of steps 0, 1, ...

        Step 0 reads true target features; step s reads the head's own output of step s - 1 at the same row
        and the true token s places on. Keys: true rows up to the row itself, then the row's own steps.
        """
        features, tokens = rows.features[:, :-1], rows.ids[:, 1:]
        dtype = self.norm.weight.dtype  # of the residual too, whatever products are taken in
        embedded = self.midlayer.input_layernorm(F.embedding(tokens, embedding).to(dtype))  # [B, T-1, H]
        feature = self.fc(features).to(dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        joined = torch.cat([embedded, self.midlayer.hidden_norm(feature)], dim=-1)
        keys, values = self._keys_values(joined, positions)
        index = rows.index().clamp_max(tokens.shape[1] - 1)
        hidden = _pick(feature, index)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            at = rows.index(step).clamp_max(tokens.shape[1] - 1)
            row_input = torch.cat([_pick(embedded, at), self.midlayer.hidden_norm(hidden)], dim=-1)
            if step:
                own.append(self._keys_values(row_input, index + step))
            query = self._heads(self.midlayer.self_attn.q_proj(row_input), index + step)
            mixed = _attend(query, keys, values, own, index)
            hidden = hidden + self.midlayer.self_attn.o_proj(mixed)
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            yield hidden

    def _heads(self, x: Tensor, positions: Tensor) -> Tensor:
        """Split into heads and rotate: [B, R, n * d] -> [B, n, R, d]."""
        split = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return rotate(split, positions, self.config.rope_theta)

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._heads(self.midlayer.self_attn.k_proj(x), positions)
        values = self.midlayer.self_attn.v_proj(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return keys, values


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, halves convention (Su et al. 2021; as in GPT-NeoX). x [B, n, R, d], positions [B, R]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [B, R] of x [B, T, H]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _attend(query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], index: Tensor) -> Tensor:
    """Joint attention over true rows j <= index and the row's own earlier steps.

    query [B, n, R, d]; keys, values [B, g, T, d]; own: pairs [B, g, R, d], one a step; returns [B, R, n * d]
    """
    batch, num_heads, num_rows, width = query.shape
    groups = keys.shape[1]
    q = query.reshape(batch, groups, num_heads // groups, num_rows, width) * width**-0.5
    scores = q.flatten(2, 3) @ keys.transpose(-1, -2)  # [B, g, n/g * R, T]
    scores = scores.unflatten(2, (-1, num_rows))
    hidden_future = torch.arange(keys.shape[2], device=index.device) > index[..., None]  # [B, R, T]
    parts = [scores.masked_fill(hidden_future[:, None, None], float("-inf"))]
    parts += [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat(parts, dim=-1).softmax(dim=-1)
    true = weights[..., : keys.shape[2]]
    mixed = (true.flatten(2, 3) @ values).unflatten(2, (-1, num_rows))
    for step, (_, v) in enumerate(own):
        mixed = mixed + weights[..., keys.shape[2] + step, None] * v[:, :, None]
    joined: Tensor = mixed.flatten(1, 2).transpose(1, 2).flatten(2)
    return joined
