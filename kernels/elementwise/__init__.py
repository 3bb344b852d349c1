"""The small operations between linear layers, in the order of roundings of transformers' Llama."""

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.elementwise import kernel, reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return x / rms(x) * weight; the norm is float32, rounded to x's dtype before the weight.

    x         [..., width]
    weight    [width]
    residual  [..., width]   becomes residual + x in place first, and that sum is what is normalised
    """
    assert weight.shape == x.shape[-1:] and (residual is None or residual.shape == x.shape)
    if _is_native(x, x, residual, weight):
        return kernel.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(x, weight, eps, residual)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: gate_up [..., 2 * width], gate first -> [..., width]."""
    assert gate_up.shape[-1] % 2 == 0
    return kernel.silu_mul(gate_up) if _is_native(gate_up, gate_up) else reference.silu_mul(gate_up)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn queries and keys to their positions, in place; halves of the rotary width are the pairs.

    q         [T, H, D]   the last two dimensions contiguous
    k         [T, G, D]
    cos, sin  [T, R]      R <= D; what lies beyond R stays
    """
    assert q.shape[0] == k.shape[0] == cos.shape[0] and cos.shape == sin.shape and cos.shape[1] <= q.shape[2]
    if _is_native(q, cos, sin) and all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k)):
        kernel.rotary(q, k, cos, sin)
    else:
        reference.rotary(q, k, cos, sin)


def _is_native(x: Tensor, *contiguous: Tensor | None) -> bool:
    if not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16) or not native.enabled():
        return False
    return all(other is None or (other.dtype == x.dtype and other.is_contiguous()) for other in contiguous)
