"""Start: what a head holds before its first training step, taken from the target where the target knows better.

It knows which weights of a target mean the same in a head. It does not know data or optimisers.
"""

from __future__ import annotations

import torch

from draft_models.head import Eagle3Head
from draft_models.target import Target


@torch.no_grad()
def from_target(head: Eagle3Head, target: Target, draft_ids: torch.Tensor) -> None:
    """The target's final norm and head rows, its last layer, and the last feature passed through fc.

    The half of q, k, v that reads the feature is the last layer's; the half that reads the embedding is the
    first layer's, which is the layer that reads embeddings in the target.
    """
    width = head.config.hidden_size
    layers = target.model.get_decoder().layers
    first, last = layers[0], layers[-1]
    attention = head.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(attention, name).weight
        weight[:, :width] = getattr(first.self_attn, name).weight
        weight[:, width:] = getattr(last.self_attn, name).weight
    attention.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
    head.midlayer.input_layernorm.weight.copy_(first.input_layernorm.weight)
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    end_from_target(head, target, draft_ids)


@torch.no_grad()
def end_from_target(head: Eagle3Head, target: Target, draft_ids: torch.Tensor) -> None:
    """Only the final norm and the rows of the head; the layer stays random."""
    head.norm.weight.copy_(target.final_norm.weight)
    head.lm_head.weight.copy_(target.head_rows(draft_ids))
