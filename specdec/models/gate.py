"""The load gate: a model is served only if the engine will compute what it means.

It knows which layer types, rope types and attention calls the bridge honours. What it does not
know it refuses, with a sentence.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from specdec.errors import UnsupportedModelError
from specdec.models.attention import AttentionProbe, probe_attention

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def _rope_types(parameters: Any) -> set[str]:
    """Rope types of a flat dict or of one dict per layer type."""
    if not isinstance(parameters, dict):
        return set()
    if any(isinstance(v, dict) for v in parameters.values()):
        return set().union(*(_rope_types(v) for v in parameters.values()))
    return {str(parameters.get("rope_type", "default"))}


def check_config(config: Any) -> None:
    """Refuse what a look at the (text) config already tells.

    Rope types whose frequencies follow the longest position of a forward ("dynamic", "longrope")
    are wrong in a packed batch, where a forward holds several requests.
    """
    layer_types = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if layer_types:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(layer_types))}; "
            f"served are {', '.join(sorted(LAYER_TYPES))}"
        )
    rope_types = _rope_types(getattr(config, "rope_parameters", None)) - ROPE_TYPES
    if rope_types:
        raise UnsupportedModelError(
            f"{config.model_type} uses rope type {', '.join(sorted(rope_types))}, whose frequencies depend on "
            f"the batch; served are {', '.join(sorted(ROPE_TYPES))}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; only decoder-only models are served")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{config.model_type} uses ALiBi position biases, which the bridge does not add")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{config.model_type} attends in both directions; only causal models are served")


def check_model(model: nn.Module, config: Any) -> AttentionProbe:
    """Refuse a model whose layers do not all go through the bridge; return what they store."""
    check_config(config)
    probe = probe_attention(model)
    if len(probe.modules) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {config.num_hidden_layers} layers but {len(probe.modules)} of them attend "
            "through transformers' attention interface; the others would keep no cache"
        )
    return probe
