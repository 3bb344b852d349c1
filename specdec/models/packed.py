"""Packed linears: a model's nn.Linear modules replaced, on CPU, by ones the native kernels read.

It knows modules and weights. The values computed are the same; the bits of a token's row no longer
depend on which other tokens share the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.kernels import native
from specdec.kernels.linear import PackedLinear, linear, pack

PACKABLE = (torch.float32, torch.bfloat16)


class PackedLinearModule(nn.Module):
    """Stands where an nn.Linear stood: x [..., K] -> [..., N]."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.in_features = packed.in_features
        self.out_features = packed.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        flat = x.reshape(-1, self.in_features)
        return linear(flat, self.packed).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain nn.Linear of a CPU model in place; return how many.

    A head tied to the embedding gets a packed copy, since the embedding is looked up by row.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype not in PACKABLE or not native.enabled():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinearModule(pack(child.weight, child.bias)))
    return len(found)
