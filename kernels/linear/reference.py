"""The plain-PyTorch twin of `linear`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]."""
    result = F.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of inputs rounded to bfloat16, in float32: what bfloat16 weights in tiles make of x [T, K]."""
    wide_bias = None if bias is None else bias.to(torch.float32)
    return F.linear(x.to(torch.bfloat16).to(torch.float32), weight.to(torch.float32), wide_bias)


def unpack(data: Tensor, out_features: int) -> Tensor:
    """Return the weight [N, K] that packed panels [panels, K, panel] hold; documents the layout.

    Of tiles [panels, steps, 2, 16, 16, 2] it is [N, 32 steps], zeros beyond K.
    """
    if data.ndim == 6:  # tiles of 16 pairs of inputs and 16 outputs
        panels, steps, tiles = data.shape[:3]
        return data.permute(0, 2, 4, 1, 3, 5).reshape(panels * tiles * 16, steps * 32)[:out_features]
    panels, in_features, panel = data.shape
    if data.dtype == torch.bfloat16:  # the two halves of a 32-bit word are outputs j and panel/2 + j
        data = data.view(panels, in_features, panel // 2, 2).transpose(-1, -2).reshape(panels, in_features, panel)
    return data.transpose(1, 2).reshape(panels * panel, in_features)[:out_features]
