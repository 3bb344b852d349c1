"""A whole step of a Llama-like decoder in one native call: embedding to logits, no Python between layers.

Covers RMSNorm before attention and before a SwiGLU, grouped-query attention with rotary positions, optionally with
biases, norms of query and key heads, sliding windows per layer, and a tied or an own head: Llama, Mistral, Qwen2,
Qwen3. Activations are float32 whatever the weights; keys and values are rounded to the cache's dtype, and inputs of
linear layers to bfloat16 where bfloat16 weights lie in tiles (`native.has_tiles()` when they were packed).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.linear import Quantization
from specdec.kernels.llama_forward import kernel, reference
from specdec.kernels.llama_forward.weights import LayerWeights, LlamaShape, LlamaWeights

__all__ = [
    "STAGES",
    "LayerWeights",
    "LlamaShape",
    "LlamaStep",
    "LlamaWeights",
    "PackedLlama",
    "llama_forward",
    "pack_llama",
]

PackedLlama = kernel.PackedLlama
STAGES = kernel.STAGES


@dataclass(frozen=True, slots=True, eq=False)
class LlamaStep:
    """The tokens of one step and where they stand."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64; PAD_SLOT (-1) keeps nothing
    block_tables: Tensor  # [B, P] int32
    seq_lens: Tensor  # [B] int32, this step's tokens included
    cu_query_lens: Tensor  # [B + 1] int32
    logits_indices: Tensor  # [L] int64, tokens whose scores are wanted
    feature_layers: tuple[int, ...] = ()  # layers whose inputs are wanted; num_layers: what leaves the last one
    inputs: Tensor | None = None  # [T, width], embeddings to use in place of token_ids


def pack_llama(
    weights: LlamaWeights, dtype: torch.dtype | None = None, quantization: Quantization | None = None
) -> "PackedLlama | LlamaWeights":
    """Lay out weights for `llama_forward`; returned as they are where native code cannot run.

    dtype         float32 or bfloat16; None keeps the embedding's
    quantization  hold linear weights as codes, those of the head in 8 bits; None: in `dtype`

    A tied head is held once: embeddings are read back out of it.
    """
    dtype = dtype or weights.embedding.dtype
    is_native = dtype in kernel.DTYPES and weights.embedding.is_cpu and native.enabled()
    return kernel.pack(weights, dtype, quantization) if is_native else weights


def llama_forward(
    model: "PackedLlama | LlamaWeights",
    step: LlamaStep,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    seconds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run every layer over a step's tokens; write their keys and values; return the scores asked for.

    kv_caches  per layer, two of [num_blocks, block_size, G, D]
    seconds    [len(STAGES)] float64; the time of each stage is added to it (native code only)
    returns    logits [L, V] and features [F, T, width], float32 (float64 stays float64 in the twin)
    """
    assert step.token_ids.shape == step.positions.shape == step.slot_mapping.shape
    assert len(kv_caches) == model.num_layers
    if isinstance(model, LlamaWeights):
        return reference.llama_forward(model, step, kv_caches)
    return kernel.llama_forward(model, step, kv_caches, seconds)
