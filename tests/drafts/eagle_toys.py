"""Tiny heads in the published layouts, random or fitted to a toy target's own text."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.drafts.eagle_oracle import Straight
from tests.toys import VOCAB_SIZE

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, DRAFT_VOCAB = 64, 4, 2, 16, 80, 120


def safeai_config(**changes: Any) -> dict[str, Any]:
    """As yuhuili/EAGLE3-*: no rope_theta, and an architecture that says nothing."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_VOCAB, "max_position_embeddings": 2048,
        "hidden_act": "silu", "bias": False, "torch_dtype": "float16",
    }  # fmt: skip
    return {k: v for k, v in {**config, **changes}.items() if v is not None}


def tensors(num_streams: int = 3, target_width: int = 64, seed: int = 0, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    """Random weights by SafeAILab's names; the draft vocabulary is a random half of the target's."""
    source = torch.Generator().manual_seed(seed)

    def new(*size: int) -> Tensor:
        noise = torch.randn(*size, generator=source, dtype=torch.float64)
        return 1 + 0.2 * noise if len(size) == 1 else 0.15 * noise

    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    made = {
        "fc.weight": new(WIDTH, num_streams * target_width),
        attention + "q_proj.weight": new(HEADS * head_dim, 2 * WIDTH),
        attention + "k_proj.weight": new(KV_HEADS * head_dim, 2 * WIDTH),
        attention + "v_proj.weight": new(KV_HEADS * head_dim, 2 * WIDTH),
        attention + "o_proj.weight": new(WIDTH, HEADS * head_dim),
        mlp + "gate_proj.weight": new(MLP, WIDTH), mlp + "up_proj.weight": new(MLP, WIDTH),
        mlp + "down_proj.weight": new(WIDTH, MLP), "lm_head.weight": new(DRAFT_VOCAB, WIDTH), "norm.weight": new(WIDTH),
    }  # fmt: skip
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{norm}.weight"] = new(WIDTH)
    return made | maps(torch.randperm(VOCAB_SIZE, generator=source)[:DRAFT_VOCAB].sort().values)


def maps(target_ids: Tensor) -> dict[str, Tensor]:
    """d2t holds offsets, t2d says who is in."""
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": t2d}


def write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """An ordinary checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in weights.items()}, directory / "model.safetensors")
    return str(directory)


@functools.lru_cache(maxsize=4)
def target_model(target: str) -> Any:
    """A toy target by transformers, float64."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()


@torch.no_grad()
def streams(target: str, ids: list[int], layer_ids: tuple[int, ...]) -> Tensor:
    """[T, ids * width]: what enters these layers; the number of layers stands for what leaves the last."""
    model = target_model(target)
    left: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: left.append(args[0]))
    hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    kept = [*hidden[:-1], left[0]]
    return torch.cat([kept[i][0] for i in layer_ids], -1)


def fit(
    weights: dict[str, Tensor], target: str, texts: list[list[int]], layer_ids: tuple[int, ...], depth: int
) -> None:
    """Solve for the lm_head that guesses these texts best, in place: a head that is often right, in a second.

    Rows are those of true features and, behind each, `depth - 1` of the head's own. The draft vocabulary becomes what
    the texts use most.
    """
    frequent = [t for t, _ in Counter(t for ids in texts for t in ids).most_common(DRAFT_VOCAB)]
    frequent += [t for t in range(VOCAB_SIZE) if t not in frequent][: DRAFT_VOCAB - len(frequent)]
    weights |= maps(torch.tensor(sorted(frequent)))
    embedding = target_model(target).get_input_embeddings().weight.detach()
    oracle = Straight(weights, embedding, heads=HEADS, kv_heads=KV_HEADS, eps=1e-5, base=10000.0)
    place = {int(t): i for i, t in enumerate(weights["t2d"].nonzero()[:, 0])}
    rows: list[Tensor] = []
    wanted: list[int] = []
    for ids in texts:
        true = oracle.fuse(streams(target, ids, layer_ids))
        for end in range(4, len(ids) - depth, 3):
            tokens, features = ids[1:end], true[: end - 1]
            for step in range(depth):
                _, after = oracle.forward(torch.tensor(tokens), features)
                follows = ids[end + step]
                if follows in place:
                    rows.append(after[-1] / (after[-1].square().mean() + 1e-5).sqrt() * oracle.w["norm.weight"])
                    wanted.append(place[follows])
                tokens, features = [*tokens, follows], torch.cat([features, after[-1:]])
    x = torch.stack(rows)
    y = torch.nn.functional.one_hot(torch.tensor(wanted), DRAFT_VOCAB).double()
    ridge = x.T @ x + 1e-3 * torch.eye(WIDTH, dtype=torch.float64)
    weights["lm_head.weight"] = 8 * torch.linalg.solve(ridge, x.T @ y).T
