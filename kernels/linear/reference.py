"""The plain-PyTorch twin of `linear`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]."""
    result = F.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def unpack(data: Tensor, out_features: int) -> Tensor:
    """Return the weight [N, K] that packed panels [panels, K, panel] hold; documents the layout."""
    panels, in_features, panel = data.shape
    if data.dtype == torch.bfloat16:  # the two halves of a 32-bit word are outputs j and panel/2 + j
        data = data.view(panels, in_features, panel // 2, 2).transpose(-1, -2).reshape(panels, in_features, panel)
    return data.transpose(1, 2).reshape(panels * panel, in_features)[:out_features]
