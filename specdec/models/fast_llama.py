"""The native forward of Llama-like models: which modules qualify, and their weights by name.

It knows transformers' Llama, Mistral, Qwen2 and Qwen3 modules. It packs weights; it does not run steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from specdec.kernels import native
from specdec.kernels.linear import Quantization
from specdec.kernels.llama_forward import LayerWeights, LlamaShape, LlamaWeights, PackedLlama, pack_llama
from specdec.models.attention import AttentionProbe

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_KNOWN_SETTINGS = {"dropout", "scaling", "sliding_window"}


def pack_fast(
    module: Any,
    attention: AttentionProbe,
    num_positions: int,
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
) -> PackedLlama | None:
    """Pack a model for the native forward; None where it does not qualify and transformers' own runs.

    num_positions   rows of the rotary tables
    dtype           of the weights that are not held as codes; None: the module's
    """
    weight: Tensor = module.get_input_embeddings().weight
    dtype = dtype or weight.dtype
    if type(module) not in FAMILIES or weight.device.type != "cpu" or not native.enabled():
        return None
    if dtype not in (torch.float32, torch.bfloat16) or not _is_plain(module, attention):
        return None
    packed = pack_llama(_weights(module, attention, num_positions), dtype, quantization)
    return packed if isinstance(packed, PackedLlama) else None


def _is_plain(module: Any, attention: AttentionProbe) -> bool:
    """True where nothing but what the native forward computes is asked for."""
    layer = module.model.layers[0]
    linears = (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, module.lm_head)
    shape, config = attention.shapes[0], module.config
    return (
        config.hidden_act == "silu"
        and all(linear.bias is None for linear in linears)
        and all(own == shape for own in attention.shapes)
        and shape.head_dim == shape.value_dim
        and shape.head_dim % 16 == 0
        and all(set(own) <= _KNOWN_SETTINGS for own in attention.settings)
        and len({own.get("scaling") for own in attention.settings}) == 1
    )


def _weights(module: Any, attention: AttentionProbe, num_positions: int) -> LlamaWeights:
    decoder, shape = module.model, attention.shapes[0]
    cos, sin = decoder.rotary_emb(torch.empty(1), torch.arange(num_positions)[None])
    head, embedding = module.lm_head.weight, decoder.embed_tokens.weight
    return LlamaWeights(
        shape=LlamaShape(
            num_heads=module.config.num_attention_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=module.config.rms_norm_eps,
            scale=float(attention.settings[0].get("scaling", shape.head_dim**-0.5)),
        ),
        embedding=embedding,
        layers=tuple(_layer(*pair) for pair in zip(decoder.layers, attention.settings, strict=True)),
        norm=decoder.norm.weight,
        head=None if head is embedding else head,
        cos=cos[0],
        sin=sin[0],
    )


def _layer(layer: Any, settings: dict[str, Any]) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=torch.cat([p.weight for p in projections]),
        qkv_bias=None if attention.q_proj.bias is None else torch.cat([p.bias for p in projections]),
        q_norm=_weight(attention, "q_norm"),
        k_norm=_weight(attention, "k_norm"),
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        window=settings.get("sliding_window"),
    )


def _weight(module: nn.Module, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return norm.weight if norm is not None else None
