"""Checkpoints: a head as a directory in the SafeAILab EAGLE-3 layout, and the state that resumes its training.

It knows file names, tensor names and the vocabulary maps (fact sheet 3.2, 3.4). It does not know training.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_models.head import Eagle3Head, HeadConfig

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a head was made for.

    feature_layer_ids   entry ids, in the order of the columns of fc
    target              name of the target
    base                hash of the target's weights
    draft_ids           [Vd] ascending target ids
    """

    feature_layer_ids: tuple[int, ...]
    target: str
    base: str
    draft_ids: Tensor


def save_head(folder: Path, head: Eagle3Head, facts: HeadFacts, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    tensors |= vocabulary_maps(facts.draft_ids, head.config.vocab_size)
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    text = json.dumps(_config(head.config, facts, dtype), indent=2) + "\n"
    _replace(folder / "config.json", lambda path: path.write_text(text))


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [Vd] offsets (target id = k + d2t[k]) and t2d [V] membership."""
    if len(draft_ids) and not bool((draft_ids.diff() > 0).all()):
        raise ValueError("draft_ids must be strictly ascending")
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": member}


def load_head(folder: Path) -> tuple[Eagle3Head, HeadFacts]:
    """Read a head that `save_head` wrote, in float32; anything else is refused with what was expected."""
    config = json.loads((folder / "config.json").read_text())
    ours = config.get("specdec")
    if config.get("architectures") != ["LlamaForCausalLMEagle3"] or not ours or ours.get("method") != "eagle3":
        raise ValueError(
            f"{folder} is not a head trained here: expected architectures ['LlamaForCausalLMEagle3'] and a key "
            f"'specdec' with method 'eagle3', found {config.get('architectures')} and {ours}"
        )
    tensors = load_file(folder / WEIGHTS)
    shape = {name: config[name] for name in HeadConfig.__dataclass_fields__ if name in config}
    head = Eagle3Head(HeadConfig(**shape, num_features=len(ours["feature_layer_ids"])))
    offsets, member = tensors.pop("d2t"), tensors.pop("t2d")
    draft_ids = offsets + torch.arange(len(offsets))
    if not torch.equal(member.nonzero()[:, 0], draft_ids):
        raise ValueError(f"{folder}: d2t and t2d name different draft vocabularies")
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
    return head, HeadFacts(tuple(ours["feature_layer_ids"]), ours["target"], ours["base"], draft_ids)


def load_facts(folder: Path) -> tuple[int, ...] | None:
    """The entry layers a head of ours reads, or None where the folder holds an ordinary model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.json; a draft is a checkpoint directory")
    ours = json.loads(path.read_text()).get("specdec")
    return tuple(ours["feature_layer_ids"]) if ours else None


def _config(head: HeadConfig, facts: HeadFacts, dtype: torch.dtype) -> dict[str, Any]:
    shapes = {name: value for name, value in asdict(head).items() if name != "num_features"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **shapes,
        "specdec": {
            "method": "eagle3",
            "feature_layer_ids": list(facts.feature_layer_ids),
            "feature_convention": "entry",
            "target": facts.target,
            "base": facts.base,
        },
    }


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda partial: torch.save(state, partial))


def load_state(path: Path) -> dict[str, Any] | None:
    """Read a training state written by `save_state`, or None where there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
