"""The shared-noise choice of a token: argmax of logits / temperature + Gumbel noise that anyone can recompute.

The noise is a pure function of (seed, position, token id), so a draft and its target, or a run with speculation and
one without, make the same choice wherever their logits agree (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.accept import kernel, reference
from specdec.kernels.accept.reference import noise, noise_of, perturbed

__all__ = ["noise", "noise_of", "perturbed", "sample"]


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose one token per row: argmax over v of logits / temperature + g(seed, position, v), ties to the lowest id.

    logits        [L, V]   float32, float64 or bfloat16; -inf marks a token that may not be chosen
    seeds         [L]      int64
    positions     [L]      int64, of the token to choose, within its output
    temperatures  [L]      below 1e-5 there is no noise
    returns       token_ids [L] int64, is_finite [L] bool: False where a row holds NaN or +inf or only -inf, and then
                  the id is 0
    """
    assert logits.ndim == 2 and seeds.shape == positions.shape == temperatures.shape == logits.shape[:1]
    assert seeds.dtype == positions.dtype == torch.int64
    is_native = logits.is_cpu and logits.dtype in native.DTYPES and native.enabled()
    implementation = kernel.sample if is_native else reference.sample
    token_ids, is_finite = implementation(logits, seeds, positions, temperatures)
    if out is None:
        return token_ids, is_finite
    out[0].copy_(token_ids)
    out[1].copy_(is_finite)
    return out
