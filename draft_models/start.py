"""Start: what a head holds before its first training step, solved in closed form from a little of its data.

It knows which weights of a target mean the same in a head, and how to make the head begin as the best linear
guess of the target's next last feature. It does not know optimisers.

The guess of row i is  fc(features of i) + O V e(i + 1):  the residual path carries the first term, attention the
second, so one query head of each group begins by looking at its own row alone. The other heads and the MLP
begin as the target's last layer's, with nothing added to the residual yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.features import Sample
from draft_models.head import Eagle3Head
from draft_models.target import Target

SELF_PAIRS = 6  # rotary pairs, the fastest, by which a self-looking head tells its own row from its neighbours
SELF_SCORE = 5.0  # score of the own row, per pair; the neighbour's is 0.9 of a pair lower: one in ninety
MLP_SIZE = 0.12  # root mean square of the MLP's inner values at the start
SHARPNESS = 0.7  # of the guess's scores: a linear guess is unsure, and the norm would hide it


@torch.no_grad()
def from_target(head: Eagle3Head, target: Target, draft_ids: Tensor) -> None:
    """The target's final norm and head rows; its last layer's projections, norms and MLP; no output yet."""
    width = head.config.hidden_size
    layers = target.model.get_decoder().layers
    first, last = layers[0], layers[-1]
    attention = head.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        weight[:, :width] = getattr(first.self_attn, name).weight
        weight[:, width:] = getattr(last.self_attn, name).weight
    for name in ("gate_proj", "up_proj"):
        getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    head.midlayer.mlp.down_proj.weight.zero_()
    attention.o_proj.weight.zero_()
    head.midlayer.input_layernorm.weight.fill_(1.0)
    head.midlayer.hidden_norm.weight.fill_(1.0)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.load_state_dict(target.final_norm.state_dict())
    head.lm_head.weight.copy_(target.head_rows(draft_ids))


@dataclass(frozen=True, slots=True)
class Guess:
    """The linear guess: rows @ by_feature + embedded @ by_token, both [in, H]."""

    by_feature: Tensor
    by_token: Tensor


@torch.no_grad()
def fit(head: Eagle3Head, target: Target, samples: Sequence[Sample], picks: Sequence[int]) -> float:
    """Make the head begin as the linear guess; return the root mean square of the features, for fc's rate."""
    features, embedded, wanted = _rows(samples, target.embedding, picks, head.config.hidden_size)
    guess = _solve(features, embedded, wanted)
    head.fc.weight.copy_(guess.by_feature.T)
    head.norm.weight.mul_(SHARPNESS)
    _carry_tokens(head, guess.by_token, embedded)
    _look_at_self(head, torch.cat([embedded, _unit(features @ guess.by_feature)], dim=1))
    _calm_mlp(head, features @ guess.by_feature + embedded @ guess.by_token)
    return feature_size(samples, picks, head.config.hidden_size)


def feature_size(samples: Sequence[Sample], picks: Sequence[int], width: int) -> float:
    """Root mean square of the features a head reads, the answers' rows only."""
    kept = [s.features[s.answer_start :].unflatten(-1, (-1, width))[:, list(picks)] for s in samples]
    return float(torch.cat(kept).float().pow(2).mean().sqrt())


def _unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


def _rows(samples: Sequence[Sample], embedding: Tensor, picks: Sequence[int], width: int) -> tuple[Tensor, ...]:
    """Features [N, F * H] of predicting rows, unit embeddings [N, H] of their tokens, unit last features [N, H]."""
    long = [s for s in samples if len(s.ids) > s.answer_start + 2 and s.answer_start]
    stored = [s.features[s.answer_start - 1 : -2].unflatten(-1, (-1, width)) for s in long]
    features = torch.cat([f[:, list(picks)].flatten(1) for f in stored]).float()
    embedded = torch.cat([_unit(embedding[s.ids[s.answer_start : -1].to(embedding.device)].float()) for s in long])
    wanted = torch.cat([_unit(s.features[s.answer_start : -1, -width:].float()) for s in long])
    return features.to(embedding.device), embedded, wanted.to(embedding.device)


def _solve(features: Tensor, embedded: Tensor, wanted: Tensor) -> Guess:
    """Ridge regression, each input damped by a share of its own size."""
    inputs = torch.cat([features, embedded], dim=1)
    gram = (inputs.T @ inputs).double()
    size = gram.diagonal().clone()
    damped = gram + torch.diag(size * 3e-3 + size.mean() * 1e-5)
    weights = torch.linalg.solve(damped, (inputs.T @ wanted).double()).to(inputs.dtype)
    split = features.shape[1]
    return Guess(weights[:split], weights[split:])


def _carry_tokens(head: Eagle3Head, by_token: Tensor, embedded: Tensor) -> None:
    """Values hold the embedding's directions that matter most to the scores; each group's first head brings them.

    The best approximation of `by_token` that fits the values' width, in the metric of inputs and scores.
    """
    config = head.config
    rank = config.num_key_value_heads * config.head_dim
    root, metric = _root(embedded), _root(head.lm_head.weight * head.norm.weight)
    left = torch.linalg.svd(root.T @ by_token @ metric)[0][:, :rank]  # [H, rank]
    values = torch.linalg.solve(root.T, left).T  # [rank, H]
    width = embedded.shape[1]
    head.midlayer.self_attn.v_proj.weight.zero_()
    head.midlayer.self_attn.v_proj.weight[: len(values), :width] = values
    output = (left.T @ root.T @ by_token).T  # [H, rank]
    for group, columns in enumerate(_first_heads(head)):
        part = output[:, group * config.head_dim : (group + 1) * config.head_dim]
        head.midlayer.self_attn.o_proj.weight[:, columns][:, : part.shape[1]] = part


def _root(rows: Tensor) -> Tensor:
    """A square root [H, H] of the mean outer product of rows [N, H], damped where they say nothing."""
    mean = rows.double().T @ rows.double() / len(rows)
    damping = 1e-4 * mean.diagonal().mean() * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    root: Tensor = torch.linalg.cholesky(mean + damping)
    return root.to(rows.dtype)


def _first_heads(head: Eagle3Head) -> list[slice]:
    """Where the first query head of every group stands among the query dimensions."""
    config = head.config
    span = config.num_attention_heads // config.num_key_value_heads * config.head_dim
    return [slice(group * span, group * span + config.head_dim) for group in range(config.num_key_value_heads)]


def _calm_mlp(head: Eagle3Head, guessed: Tensor) -> None:
    """Scale the MLP's inner values, which the target's last layer makes for a residual of its own, huge size.

    Its output starts at zero; what it learns per update is as large as these values (measured: without this the
    same rate that trains the attention undoes the guess).
    """
    inner = head.midlayer.post_attention_layernorm(guessed[: 1 << 12])
    values = F.silu(head.midlayer.mlp.gate_proj(inner)) * head.midlayer.mlp.up_proj(inner)
    head.midlayer.mlp.up_proj.weight.mul_(MLP_SIZE / float(values.square().mean().sqrt()))


def _look_at_self(head: Eagle3Head, joined: Tensor) -> None:
    """Queries and keys that are the same for every row before they are rotated: rows at distance 0 score highest.

    A constant is read off the inputs by regression; it fills the fastest rotary pairs, which the group's other
    heads leave alone.
    """
    config = head.config
    attention, half = head.midlayer.self_attn, config.head_dim // 2
    gram = (joined.T @ joined).double()
    damped = gram + 1e-3 * torch.diag(gram.diagonal())
    constant = torch.linalg.solve(damped, joined.sum(dim=0).double()).to(joined.dtype)  # [2 H]
    pairs = min(SELF_PAIRS, half)
    amplitude = (SELF_SCORE * config.head_dim**0.5) ** 0.5
    for group, columns in enumerate(_first_heads(head)):
        keys = attention.k_proj.weight[group * config.head_dim : (group + 1) * config.head_dim]
        keys[:pairs], keys[half : half + pairs] = amplitude * constant, 0.0
        span = slice(
            columns.start, columns.start + config.num_attention_heads // config.num_key_value_heads * config.head_dim
        )
        queries = attention.q_proj.weight[span].unflatten(0, (-1, config.head_dim))
        queries[:, :pairs], queries[:, half : half + pairs] = 0.0, 0.0
        queries[0] = 0.0
        queries[0, :pairs] = amplitude * constant
        attention.q_proj.weight[span] = queries.flatten(0, 1)
