"""The plain-PyTorch twin of `llama_forward`, made of the twins of its parts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.elementwise import reference as elementwise
from specdec.kernels.linear.reference import rounded_linear
from specdec.kernels.llama_forward.weights import LayerWeights, LlamaWeights
from specdec.kernels.paged_attention import reference as attention
from specdec.kernels.write_kv import reference as cache

if TYPE_CHECKING:
    from specdec.kernels.llama_forward import LlamaStep


@torch.no_grad()
def llama_forward(
    model: LlamaWeights, step: "LlamaStep", kv_caches: Sequence[tuple[Tensor, Tensor]], rounds_inputs: bool = False
) -> tuple[Tensor, Tensor]:
    """As the door; activations are float32, or float64 where the weights are.

    rounds_inputs   inputs of linear layers become bfloat16, as where bfloat16 weights lie in tiles
    """
    linear = rounded_linear if rounds_inputs else F.linear
    wide = torch.promote_types(model.embedding.dtype, torch.float32)
    hidden = (F.embedding(step.token_ids, model.embedding) if step.inputs is None else step.inputs).to(wide)
    entering = []
    for layer, (k_cache, v_cache) in zip(model.layers, kv_caches, strict=True):
        entering.append(hidden)
        hidden = hidden + attend(model, layer, step, hidden, (k_cache, v_cache), linear)
        x = elementwise.rms_norm(hidden, layer.post_norm.to(wide), model.shape.eps)
        gate_up = linear(x, torch.cat([layer.gate, layer.up]).to(wide), None)
        hidden = hidden + linear(elementwise.silu_mul(gate_up), layer.down.to(wide), None)
    entering.append(hidden)
    last = elementwise.rms_norm(hidden[step.logits_indices], model.norm.to(wide), model.shape.eps)
    logits = linear(last, (model.embedding if model.head is None else model.head).to(wide), None)
    features = [entering[index] for index in step.feature_layers]
    return logits, torch.stack(features) if features else hidden.new_empty(0, *hidden.shape)


def attend(
    model: LlamaWeights,
    layer: LayerWeights,
    step: "LlamaStep",
    hidden: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """hidden [T, width] -> [T, width], what attention adds to it; keys and values are cached on the way."""
    shape, wide = model.shape, hidden.dtype
    k_cache, v_cache = kv_cache
    x = elementwise.rms_norm(hidden, layer.input_norm.to(wide), shape.eps)
    qkv = linear(x, layer.qkv.to(wide), None if layer.qkv_bias is None else layer.qkv_bias.to(wide))
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.tensor_split((shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = elementwise.rms_norm(q, layer.q_norm.to(wide), shape.eps)
        k = elementwise.rms_norm(k, layer.k_norm.to(wide), shape.eps)
    elementwise.rotary(q, k, model.cos[step.positions].to(wide), model.sin[step.positions].to(wide))
    cache.write_kv(k.to(k_cache.dtype), v.to(v_cache.dtype), step.slot_mapping, k_cache, v_cache)
    mixed = torch.empty_like(q)
    tables = (step.block_tables, step.seq_lens, step.cu_query_lens)
    attention.paged_attention(q, k_cache, v_cache, *tables, shape.scale, layer.window, None, None, mixed)
    return linear(mixed.flatten(1), layer.out.to(wide), None if layer.out_bias is None else layer.out_bias.to(wide))
