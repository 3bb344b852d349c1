"""A feature draft's head (EAGLE-3): features in, several draft tokens a row out, no host work between them.

Row t pairs token t with the target's feature of position t - 1, and its output proposes token t + 1. Its key and value
lie at position t of the cache, so that they depend on nothing behind t; position 0 holds no pair and is never read.
A pair turns by the rotary angle of t - 1, as in training. (EAGLE-3: Li, Wei, Zhang, Zhang 2025, arXiv 2503.01840.)
Activations are float32 whatever the weights; float64 weights stay float64 in the twin.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.eagle_forward import kernel, reference
from specdec.kernels.eagle_forward.weights import EagleWeights

__all__ = ["Drafted", "EagleWeights", "PackedEagle", "Pairs", "draft", "fuse", "keep", "pack_eagle"]

PackedEagle = kernel.PackedEagle


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Tokens, and the features of the positions before them."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, of the tokens; at least 1
    features: Tensor  # [N, width]


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What `draft` made."""

    token_ids: Tensor  # [N, depth] int64, the target's ids; -1 behind a row's last draft
    confidences: Tensor  # [N, depth] the head's probability of each
    logits: Tensor | None  # [N, Vd] of the last draft, where asked for
    features: Tensor  # [N, width] behind each row's last draft


def pack_eagle(weights: EagleWeights, dtype: torch.dtype, num_bits: int | None = None) -> "PackedEagle | EagleWeights":
    """Lay out weights for native code; returned as they are where it cannot run.

    dtype      float32 or bfloat16
    num_bits   8: round linear weights to 8-bit codes in groups of 32 (as GGUF's Q8_0); half of bfloat16's memory

    In bfloat16 and where `native.has_tiles()`, codes lie in tiles too, and inputs are rounded to bfloat16.
    """
    is_native = dtype in kernel.DTYPES and weights.embedding.is_cpu and native.enabled()
    is_native = is_native and weights.shape.head_dim % 16 == 0
    return kernel.pack(weights, dtype, num_bits) if is_native else weights


def fuse(model: "PackedEagle | EagleWeights", streams: Tensor) -> Tensor:
    """Turn a target's residual streams into features: streams [T, F] -> [T, width]."""
    if isinstance(model, EagleWeights):
        return reference.fuse(model, streams)
    return kernel.fuse(model, streams)


def keep(model: "PackedEagle | EagleWeights", pairs: Pairs, slot_mapping: Tensor, cache: tuple[Tensor, Tensor]) -> None:
    """Write keys and values of pairs of true features.

    slot_mapping  [N] int64
    cache         two of [num_blocks, block_size, G, D]
    """
    assert pairs.token_ids.shape == pairs.positions.shape == slot_mapping.shape == pairs.features.shape[:1]
    implementation = reference.keep if isinstance(model, EagleWeights) else kernel.keep
    implementation(model, pairs, slot_mapping, cache)  # type: ignore[arg-type]


def draft(
    model: "PackedEagle | EagleWeights",
    pairs: Pairs,
    block_tables: Tensor,
    num_active: list[int],
    cache: tuple[Tensor, Tensor],
    wants_logits: bool = False,
) -> Drafted:
    """Make the likeliest token of every pair, then of what that token and the head's own output make, and so on.

    block_tables  [N, P] int32, covering position + depth - 1 of every row
    num_active    [depth] rows that make each draft, never more than made the one before: the first ones
    wants_logits  return the last draft's scores as well

    Keys and values of all drafts' pairs are written; those behind the first came from the head's own features.
    """
    assert pairs.token_ids.shape == pairs.positions.shape == pairs.features.shape[:1] == block_tables.shape[:1]
    assert num_active and num_active == sorted(num_active, reverse=True) and num_active[0] == len(pairs.token_ids)
    implementation = reference.draft if isinstance(model, EagleWeights) else kernel.draft
    drafted = implementation(model, pairs, block_tables, num_active, cache, wants_logits)  # type: ignore[arg-type]
    return Drafted(*drafted)
