"""What a feature draft's config.json means: which target layers it reads, where it norms, how far it turns.

Published layouts say these things differently or not at all; the policy for each is written down here and nowhere
else. It knows dictionaries; tensors and the target are checked by `eagle_head`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from specdec.errors import UnsupportedModelError

EXPECTED = (
    "a feature draft is an EAGLE-3 head: SafeAILab's or SpecForge's layout (midlayer.*, fc, norm, lm_head, d2t) or the "
    "speculators layout of type eagle3 (layers.0.*), one layer deep"
)
_MODEL_TYPES = ("llama", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The facts a head's tensors do not tell.

    layer                the one decoder layer as a transformers config: heads, widths, eps, rotary positions
    feature_layer_ids    residual streams it reads, as ids of the layers they enter, in the order they are joined
    draft_vocab_size     rows of its lm_head; None: the target's whole vocabulary
    window               newest positions a token sees; None: all
    is_residual_normed   attention is added to the normed feature
    is_feedback_normed   the next draft's feature has passed the final norm (EAGLE-3.1's norm_output)
    norms_streams        0, or how many parts of the joined streams are normed before fc (1: the whole)
    """

    layer: Any
    feature_layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int | None
    window: int | None
    is_residual_normed: bool
    is_feedback_normed: bool
    norms_streams: int


def read_config(values: Mapping[str, Any], num_target_layers: int) -> EagleConfig:
    """Read a parsed config.json; UnsupportedModelError names what is not understood."""
    is_speculators = "speculators_model_type" in values
    refuse_other_kinds(values)
    layer_values = dict(values.get("transformer_layer_config", {}) if is_speculators else values)
    layer = _layer_config(layer_values, "qwen3" if is_speculators else "llama")
    ids = feature_layer_ids(values, num_target_layers)
    norms = 1 if values.get("norm_before_fc") else len(ids) if values.get("fc_norm") else 0
    if values.get("norm_before_fc") and values.get("fc_norm"):
        raise UnsupportedModelError("the draft's config says norm_before_fc and fc_norm; they exclude each other")
    draft_vocab_size = values.get("draft_vocab_size")
    return EagleConfig(
        layer=layer,
        feature_layer_ids=ids,
        vocab_size=int(layer.vocab_size),
        draft_vocab_size=None if draft_vocab_size is None else int(draft_vocab_size),
        window=_window(layer_values),
        is_residual_normed=bool(values.get("norm_before_residual", is_speculators)),
        is_feedback_normed=bool(values.get("norm_output", False)),
        norms_streams=norms,
    )


def refuse_other_kinds(values: Mapping[str, Any]) -> None:
    """Name a kind of draft that is not an EAGLE-3 head, as far as its config tells."""
    kind = values.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UnsupportedModelError(f"the draft is of speculators type {kind!r}, which is not supported; {EXPECTED}")
    architecture = str((values.get("architectures") or [""])[0])
    if "dflash_config" in values or any(word in architecture for word in ("DFlash", "DSpark", "PEagle", "Peagle")):
        raise UnsupportedModelError(f"the draft's architecture {architecture!r} is not supported; {EXPECTED}")
    if (values.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            f"the draft's eagle_config says use_aux_hidden_state=false, so it reads the normed output; {EXPECTED}"
        )


def feature_layer_ids(values: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """The residual streams a head reads, as ids of the layers they enter.

    our own key        specdec.feature_layer_ids, with specdec.feature_convention "entry" or "out"
    speculators        eagle_aux_hidden_state_layer_ids are entry ids (as vLLM reads them)
    eagle_config       eagle_aux_hidden_state_layer_ids are ids of layers' outputs (as SGLang and SpecForge read them)
    target_layer_ids   DeepSpec's, outputs too
    nothing            2, the middle and the third from the end, the same layers in every implementation

    Published heads join streams in the order of layers, whatever the order of the list; ours in the list's.
    """
    own, nested = values.get("specdec") or {}, values.get("eagle_config") or {}
    if own.get("feature_layer_ids") is not None:
        convention = own.get("feature_convention")
        if convention not in ("entry", "out"):
            raise UnsupportedModelError(f"specdec.feature_convention is {convention!r}; it must be 'entry' or 'out'")
        ids, shift = own["feature_layer_ids"], int(convention == "out")
    elif nested.get("eagle_aux_hidden_state_layer_ids") is not None:
        ids, shift = nested["eagle_aux_hidden_state_layer_ids"], 1
    elif values.get("eagle_aux_hidden_state_layer_ids") is not None:
        ids, shift = values["eagle_aux_hidden_state_layer_ids"], 0
    elif values.get("target_layer_ids") is not None:
        ids, shift = values["target_layer_ids"], 1
    else:
        ids, shift = (2, num_target_layers // 2, num_target_layers - 3), 0
    in_order = ids if own.get("feature_layer_ids") is not None else sorted(ids)
    return _checked_ids(in_order, shift, num_target_layers)


def _checked_ids(ids: Sequence[int], shift: int, num_target_layers: int) -> tuple[int, ...]:
    shifted = tuple(int(i) + shift for i in ids)
    wrong = [i for i in shifted if not 0 <= i <= num_target_layers]
    if wrong or not shifted:
        raise UnsupportedModelError(
            f"the draft reads the streams that enter layers {list(shifted)}; a target of {num_target_layers} layers "
            f"has 0 to {num_target_layers}"
        )
    return shifted


def _layer_config(values: dict[str, Any], default_type: str) -> Any:
    """The draft layer as a transformers config; absent keys mean that config class's own defaults.

    The target's rotary base is never inherited: a file without one means 10000.
    """
    model_type = values.pop("model_type", default_type)
    if model_type not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"the draft's layer is of model type {model_type!r}; supported are {', '.join(_MODEL_TYPES)}"
        )
    if "hidden_size" not in values or "vocab_size" not in values:
        raise UnsupportedModelError(f"the draft's config lacks hidden_size or vocab_size; {EXPECTED}")
    depth = values.get("draft_num_hidden_layers", values.get("num_hidden_layers", 1))
    if depth != 1:
        raise UnsupportedModelError(f"the draft is {depth} layers deep; {EXPECTED}")
    config = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if k != "layer_types"})
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"the draft's rotary positions are of type {rope_type!r}; supported are {', '.join(_ROPE_TYPES)}"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"the draft's hidden_act is {config.hidden_act!r}; only silu is supported")
    return config


def _window(values: Mapping[str, Any]) -> int | None:
    """The window of the one layer, where its type says that it has one."""
    kinds = values.get("layer_types") or ["full_attention"]
    return int(values["sliding_window"]) if kinds[0] == "sliding_attention" else None
