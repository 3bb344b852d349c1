"""The tensors of a Llama-like decoder, by name."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; linear weights as [outputs, inputs]."""

    input_norm: Tensor  # [width]
    qkv: Tensor  # [(H + 2 G) D, width], queries first
    qkv_bias: Tensor | None  # [(H + 2 G) D]
    q_norm: Tensor | None  # [D], of each query head before it turns
    k_norm: Tensor | None  # [D]
    out: Tensor  # [width, H D]
    out_bias: Tensor | None  # [width]
    post_norm: Tensor  # [width]
    gate: Tensor  # [mlp, width]
    up: Tensor  # [mlp, width]
    down: Tensor  # [width, mlp]
    window: int | None = None  # newest positions a token sees; None: all


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Numbers that the tensors do not tell."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of scores, usually head_dim ** -0.5


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """A decoder with its embedding, rotary tables and head."""

    shape: LlamaShape
    embedding: Tensor  # [V, width]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [width]
    head: Tensor | None  # [V, width]; None: the embedding
    cos: Tensor  # [positions, R], any scaling of rotary positions included
    sin: Tensor  # [positions, R]

    @property
    def num_layers(self) -> int:
        return len(self.layers)
