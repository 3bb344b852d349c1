"""Shrinking: a config of the same family, small enough to try in a moment.

It knows the names that transformers' configs use for sizes. Whatever shapes the computation (layer
types, rope type, biases, soft caps, norms, sinks) is kept as it is.
"""

from __future__ import annotations

from typing import Any

NUM_LAYERS = 4
NUM_HEADS = 4
HEAD_DIM = 16
WIDTH = NUM_HEADS * HEAD_DIM
VOCAB_SIZE = 128
WINDOW = 6

_SIZES: dict[str, int] = {
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "num_attention_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "n_inner": 48,
    "rotary_dim": 8,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Any) -> Any:
    """The same family at a toy size.

    Layers are cut to the first few, but at least one of every layer type stays.
    """
    names = dict(getattr(config, "attribute_map", None) or {})
    values = config.to_dict()
    keep = _kept_layers(config)
    for key, value in list(values.items()):
        if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers and len(value) > len(keep):
            values[key] = [value[i] for i in keep]
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(keep)
    for name, size in _SIZES.items():
        key = names.get(name, name)
        if isinstance(values.get(key), int) and values[key] > 0:
            values[key] = size
    for key in values:
        if key.endswith("intermediate_size"):
            values[key] = [48] * len(keep) if isinstance(values[key], (list, tuple)) else 48
    _shrink_heads(config, values, names)
    if isinstance(values.get("qk_rope_head_dim"), int) and isinstance(values.get("head_dim"), int):
        values["head_dim"] = values["qk_rope_head_dim"]  # what the rotary table is as wide as, in these families
    _shrink_overrides(values, keep)
    if isinstance(values.get("num_kv_shared_layers"), int):
        values["num_kv_shared_layers"] = 0
    for key in _TOKENS:
        if key in values:
            values[key] = None if key == "pad_token_id" else 1
    values["initializer_range"] = 0.2
    values.pop("quantization_config", None)
    return type(config).from_dict(values)


def _kept_layers(config: Any) -> list[int]:
    """The first layers, the later ones exchanged until every layer type is there."""
    count = min(config.num_hidden_layers, NUM_LAYERS)
    types = list(getattr(config, "layer_types", None) or [])
    keep = list(range(count))
    for index, kind in enumerate(types):
        if all(types[i] != kind for i in keep):
            keep[-1] = index
    return sorted(set(keep))


def _shrink_overrides(values: dict[str, Any], keep: list[int]) -> None:
    """Settings of single layers follow their layer; a head wider than the others stays wider."""
    overrides = values.get("per_layer_config")
    if not isinstance(overrides, dict):
        return
    by_index = {int(index): own for index, own in overrides.items()}
    values["per_layer_config"] = {
        new: {name: 2 * HEAD_DIM if name == "head_dim" else value for name, value in by_index[old].items()}
        for new, old in enumerate(keep)
        if old in by_index
    }


def _shrink_heads(config: Any, values: dict[str, Any], names: dict[str, str]) -> None:
    """Keep what the ratio of query to key heads says: one to one, grouped, or a single key head."""
    key = names.get("num_key_value_heads", "num_key_value_heads")
    if isinstance(values.get(key), int):
        if values[key] == config.num_attention_heads:
            values[key] = NUM_HEADS
        else:
            values[key] = min(values[key], NUM_HEADS // 2)
    if isinstance(values.get("num_global_key_value_heads"), int):
        values["num_global_key_value_heads"] = NUM_HEADS // 2
