"""Published layouts of EAGLE-3 heads: which tensors a file must hold, in which shapes, under one set of names.

It knows names and shapes, and what other kinds of drafts look like, so that it can refuse them by name. It reads
no configs and computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.models.eagle_config import EXPECTED, EagleConfig

_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")


def canonical(name: str) -> str:
    """A tensor's name in SafeAILab's layout."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def looks_like_feature_draft(names: Iterable[str]) -> bool:
    """True where a file's tensors are those of a draft over a target's features, supported or not."""
    known = {canonical(name) for name in names}
    return bool(known & {"fc.weight", "mask_hidden"}) or any(re.match(r"\d+\.\d+\.linear\.weight", n) for n in known)


def refuse_other_kinds(shapes: Mapping[str, tuple[int, ...]], width: int) -> None:
    """Name a kind of draft that is not an EAGLE-3 head of one layer, as far as its tensors tell."""
    query = shapes.get("midlayer.self_attn.q_proj.weight")
    found = None
    if "mask_hidden" in shapes:
        found = "a P-EAGLE head (it has mask_hidden)"
    elif any(re.match(r"\d+\.\d+\.linear\.weight", name) for name in shapes):
        found = "a set of Medusa heads"
    elif any(re.match(r"(layers\.[1-9]|additional_layers)", name) for name in shapes):
        found = "a head of several layers"
    elif query is not None and len(query) == 2 and query[1] == width:
        found = f"an EAGLE-1 head (its q_proj takes {width} numbers, not {2 * width})"
    elif "fc.weight" not in shapes or query is None:
        found = "no feature draft: it lacks fc.weight or the layer's q_proj"
    if found is not None:
        raise UnsupportedModelError(f"the draft is {found}, which is not supported; {EXPECTED}")


def check_tensors(tensors: Mapping[str, Tensor], config: EagleConfig, target_width: int) -> None:
    """Refuse missing, unknown and misshapen tensors, naming what was expected."""
    required, optional = _expected(config, target_width)
    fc = tensors["fc.weight"].shape
    if tuple(fc) != required["fc.weight"]:
        raise ModelLoadError(
            f"the draft's fc.weight is {list(fc)}; its config and this target need {list(required['fc.weight'])} "
            f"({len(config.feature_layer_ids)} streams of {target_width}): it was made for another target"
        )
    missing = sorted(set(required) - set(tensors))
    if missing:
        raise ModelLoadError(f"the draft lacks {', '.join(missing[:5])}; {EXPECTED}")
    known = required | optional
    for name, tensor in tensors.items():
        if name in known and tuple(tensor.shape) != known[name]:
            raise ModelLoadError(f"the draft's {name} is {list(tensor.shape)}, not {list(known[name])}")
    unknown = sorted(set(tensors) - set(known) - set(_UNUSED))
    if unknown:
        raise UnsupportedModelError(f"the draft holds {', '.join(unknown[:5])}, which nothing would use; {EXPECTED}")


Shapes = dict[str, tuple[int, ...]]


def _expected(config: EagleConfig, target_width: int) -> tuple[Shapes, Shapes]:
    """Shapes of the tensors that must be there, and of those that may."""
    layer = config.layer
    width, mlp, head_dim = layer.hidden_size, layer.intermediate_size, layer.head_dim
    q, kv = layer.num_attention_heads * head_dim, layer.num_key_value_heads * head_dim
    num_streams, rows = len(config.feature_layer_ids), config.draft_vocab_size or config.vocab_size
    attention, mlp_name = "midlayer.self_attn.", "midlayer.mlp."
    required: Shapes = {
        "fc.weight": (width, num_streams * target_width),
        attention + "q_proj.weight": (q, 2 * width),
        attention + "k_proj.weight": (kv, 2 * width),
        attention + "v_proj.weight": (kv, 2 * width),
        attention + "o_proj.weight": (width, q),
        mlp_name + "gate_proj.weight": (mlp, width),
        mlp_name + "up_proj.weight": (mlp, width),
        mlp_name + "down_proj.weight": (width, mlp),
        "lm_head.weight": (rows, width),
    }
    norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    required |= {f"{norm}.weight": (width,) for norm in norms}
    if layer.model_type != "llama":  # qwen3 norms the heads
        required |= {f"{attention}{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    if layer.attention_bias:
        required |= {f"{attention}{name}_proj.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
    if config.norms_streams == 1:
        required["input_norm.weight"] = (num_streams * target_width,)
    elif config.norms_streams:
        required |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_streams)}
    if rows != config.vocab_size:
        required["d2t"] = (rows,)
    optional: Shapes = {"embed_tokens.weight": (config.vocab_size, width), "t2d": (config.vocab_size,)}
    optional |= {"d2t": (rows,), "fc.bias": (width,), attention + "o_proj.bias": (width,)}
    return required, optional
