"""The plain-PyTorch twins of the elementwise operations."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x [..., width], weight [width], residual [..., width] (in place) -> [..., width]."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * width] -> [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """q [T, H, D] and k [T, G, D] in place, cos and sin [T, R]."""
    cos, sin = cos[:, None], sin[:, None]
    for x in (q, k):
        turned = x[..., : cos.shape[-1]]
        low, high = turned.chunk(2, dim=-1)
        turned.copy_(turned * cos + torch.cat([-high, low], dim=-1) * sin)
