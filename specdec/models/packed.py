"""Packed linears: a model's nn.Linear modules replaced, on CPU, by ones the native kernels read.

It knows modules and weights. The values computed are the same; the bits of a token's row no longer
depend on which other tokens share the forward.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.kernels import native
from specdec.kernels.linear import PackedLinear, Quantization, kernel, linear, pack, pack_groups

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
        flat, packed = x.reshape(-1, self.in_features), self.packed
        if torch.compiler.is_compiling():
            assert packed.code is not None
            y: Tensor = torch.ops.specdec.linear(flat, packed.data, packed.bias, packed.out_features, packed.code)
        else:
            y = linear(flat, packed)
        return y.view(*x.shape[:-1], self.out_features)


# The kernel under a name that the compiler calls and does not look into.
torch.library.define("specdec::linear", "(Tensor x, Tensor data, Tensor? bias, int out_features, int code) -> Tensor")


@torch.library.impl("specdec::linear", "CPU")
def _linear(x: Tensor, data: Tensor, bias: Tensor | None, out_features: int, code: int) -> Tensor:
    return kernel.linear(x, data, code, bias, out_features)


@torch.library.register_fake("specdec::linear")  # type: ignore[untyped-decorator]
def _(x: Tensor, data: Tensor, bias: Tensor | None, out_features: int, code: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def pack_linears(model: nn.Module, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
    """Replace every plain nn.Linear of a CPU model in place; return how many.

    dtype   of inputs and outputs, and of weights that are not held as codes

    A head tied to the embedding gets a packed copy, since the embedding is looked up by row.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu" or dtype not in PACKABLE or not native.enabled():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        own = replace(quantization, num_bits=8) if quantization is not None and child is _head(model) else quantization
        setattr(parent, name, PackedLinearModule(_packed(child, dtype, own)))
    return len(found)


def _head(model: nn.Module) -> object:
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if callable(get_head) else None


def _packed(layer: nn.Linear, dtype: torch.dtype, quantization: Quantization | None) -> PackedLinear:
    grouped = None if quantization is None else pack_groups(layer.weight, layer.bias, quantization, dtype)
    return grouped or pack(layer.weight, layer.bias, dtype)
