"""A feature draft's head: read from a checkpoint, checked against the target it will serve, laid out to run.

It knows files, shapes and weights of an EAGLE-3 head. It does not know requests, blocks or when to draft.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.kernels.eagle_forward import EagleWeights, PackedEagle, pack_eagle
from specdec.kernels.llama_forward import LayerWeights, LlamaShape
from specdec.kv_cache import LayerShape
from specdec.models.checkpoint import read_json, read_tensors, tensor_shapes
from specdec.models.eagle_config import EXPECTED, EagleConfig, read_config
from specdec.models.eagle_layout import canonical, check_tensors, looks_like_feature_draft, refuse_other_kinds
from specdec.models.loaded import LoadedModel
from specdec.tokenizer import first_difference

logger = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head ready to be given a cache.

    weights       packed for native code, or plain for the twin
    kv_shape      what it stores for a token
    width         numbers in a feature
    vocab_size    of the target
    target_ids    [Vd] what its draft ids mean to the target, ascending
    """

    path: Path
    config: EagleConfig
    weights: PackedEagle | EagleWeights
    kv_shape: LayerShape
    width: int
    vocab_size: int
    target_ids: Tensor
    dtype: torch.dtype
    device: torch.device


def is_feature_draft(path: Path) -> bool:
    """True where a directory holds a draft over a target's features rather than a model of its own."""
    if not (path / "config.json").is_file():
        return False
    values = read_json(path / "config.json")
    if "speculators_model_type" in values or "eagle_config" in values or "dflash_config" in values:
        return True
    return looks_like_feature_draft(tensor_shapes(path))


def load_eagle(path: Path, target: LoadedModel, dtype: torch.dtype) -> EagleHead:
    """Load a head for one target; whatever does not belong to it is refused with what was expected.

    dtype   bfloat16 on a CPU with native code holds linear weights as 8-bit codes: half the memory to read, and what
            they round off can only cost acceptance
    """
    if not is_feature_draft(path):
        raise UnsupportedModelError(f"{path} holds no feature draft; {EXPECTED}")
    values = read_json(path / "config.json")
    config = read_config(values, target.config.num_hidden_layers)
    tensors = {canonical(name): tensor for name, tensor in read_tensors(path).items()}
    refuse_other_kinds({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config.layer.hidden_size)
    _check_target(path, config, target)
    check_tensors(tensors, config, target.config.hidden_size)
    target_ids = _target_ids(tensors, config)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = _target_embedding(target, config)
    plain = _weights(tensors, config, embedding, target_ids, target.max_model_len)
    weights = pack_eagle(plain, dtype, 8 if dtype == torch.bfloat16 else None) if target.device.type == "cpu" else plain
    if isinstance(weights, EagleWeights):
        weights = plain.to(target.device, dtype)
    layer = config.layer
    logger.info("draft %s reads the streams that enter target layers %s", path.name, list(config.feature_layer_ids))
    return EagleHead(
        path=path,
        config=config,
        weights=weights,
        kv_shape=LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim),
        width=layer.hidden_size,
        vocab_size=target.vocab_size,
        target_ids=target_ids.to(target.device),
        dtype=dtype,
        device=target.device,
    )


def _check_target(path: Path, config: EagleConfig, target: LoadedModel) -> None:
    """Refuse another vocabulary or tokenizer."""
    if config.vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"the draft's vocabulary has {config.vocab_size} tokens and the target's {target.vocab_size}; "
            "it was made for another target"
        )
    if target.tokenizer is not None and any(path.glob("tokenizer*.json")):
        from transformers import AutoTokenizer

        difference = first_difference(target.tokenizer, AutoTokenizer.from_pretrained(path))
        if difference is not None:
            raise ModelLoadError(f"draft {path} has another tokenizer than the target: {difference}")


def _target_ids(tensors: Mapping[str, Tensor], config: EagleConfig) -> Tensor:
    """What draft ids mean to the target, [Vd]: d2t holds offsets, and t2d must say the same."""
    rows = config.draft_vocab_size or config.vocab_size
    index = torch.arange(rows)
    if rows == config.vocab_size:
        return index
    offsets = tensors["d2t"].to(torch.int64)
    if not offsets.any():
        raise ModelLoadError(
            f"the draft's d2t is all zeros for {rows} of {config.vocab_size} tokens: it was exported without its map"
        )
    ids = index + offsets
    if (ids[1:] <= ids[:-1]).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ModelLoadError("the draft's d2t does not lead to ascending ids of the target's vocabulary")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero()[:, 0], ids):
        raise ModelLoadError("the draft's d2t and t2d name different tokens")
    return ids


def _target_embedding(target: LoadedModel, config: EagleConfig) -> Tensor:
    """The target's own embedding, which heads without one share."""
    width = config.layer.hidden_size
    module = target.module.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = module.weight
    if type(module) is not torch.nn.Embedding:
        raise UnsupportedModelError(f"the target's embedding is a {type(module).__name__}, which a head cannot share")
    if weight.shape[1] != width:
        raise ModelLoadError(
            f"the draft is {width} wide and has no embed_tokens.weight; the target's is {weight.shape[1]} wide"
        )
    if weight.is_meta:  # the native forward holds it packed
        names = ["model.embed_tokens.weight", "embed_tokens.weight"]
        weight = next(iter(read_tensors(target.path, names).values()))
    return weight.detach()[: config.vocab_size]


def _weights(
    tensors: Mapping[str, Tensor], config: EagleConfig, embedding: Tensor, target_ids: Tensor, num_positions: int
) -> EagleWeights:
    layer, attention = config.layer, "midlayer.self_attn."
    cos, sin = LlamaRotaryEmbedding(layer)(torch.empty(1), torch.arange(num_positions)[None])
    joined = [tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]
    biases = [tensors[f"{attention}{name}_proj.bias"] for name in "qkv"] if layer.attention_bias else None
    norms = [tensors[f"fc_norm.{i}.weight"] for i in range(config.norms_streams)] if config.norms_streams > 1 else None
    return EagleWeights(
        shape=LlamaShape(
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            eps=layer.rms_norm_eps,
            scale=layer.head_dim**-0.5,
        ),
        fc=tensors["fc.weight"],
        fc_bias=tensors.get("fc.bias"),
        feature_norm=torch.cat(norms) if norms else tensors.get("input_norm.weight"),
        num_feature_norms=config.norms_streams,
        embedding=embedding,
        hidden_norm=tensors["midlayer.hidden_norm.weight"],
        layer=LayerWeights(
            input_norm=tensors["midlayer.input_layernorm.weight"],
            qkv=torch.cat(joined),
            qkv_bias=None if biases is None else torch.cat(biases),
            q_norm=tensors.get(attention + "q_norm.weight"),
            k_norm=tensors.get(attention + "k_norm.weight"),
            out=tensors[attention + "o_proj.weight"],
            out_bias=tensors.get(attention + "o_proj.bias"),
            post_norm=tensors["midlayer.post_attention_layernorm.weight"],
            gate=tensors["midlayer.mlp.gate_proj.weight"],
            up=tensors["midlayer.mlp.up_proj.weight"],
            down=tensors["midlayer.mlp.down_proj.weight"],
            window=config.window,
        ),
        norm=tensors["norm.weight"],
        head=tensors["lm_head.weight"],
        target_ids=target_ids,
        cos=cos[0],
        sin=sin[0],
        is_residual_normed=config.is_residual_normed,
        is_feedback_normed=config.is_feedback_normed,
    )
