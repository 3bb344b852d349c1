"""Calls into native/linear.cpp."""

import torch
from torch import Tensor

from specdec.kernels import native

DTYPES = (torch.float32, torch.bfloat16)


def pack(weight: Tensor) -> Tensor:
    """weight [N, K], contiguous -> panels [ceil(N / panel), K, panel], padded with zeros."""
    out_features, in_features = weight.shape
    panel = native.function("specdec_panel", "", "i")()
    packed = torch.empty(-(-out_features // panel), in_features, panel, dtype=weight.dtype)
    call = native.function("specdec_pack", "ppiiii")
    dtype = native.DTYPES[weight.dtype]
    call(weight.data_ptr(), packed.data_ptr(), out_features, in_features, dtype, torch.get_num_threads())
    return packed


def linear(x: Tensor, data: Tensor, bias: Tensor | None, out_features: int, out: Tensor | None = None) -> Tensor:
    """x [T, K], data [panels, K, panel], bias [N] float32 -> [T, N]."""
    x = x.contiguous()
    num_tokens, in_features = x.shape
    if out is None:
        out = torch.empty(num_tokens, out_features, dtype=x.dtype)
    dtype = native.DTYPES[x.dtype]
    native.function("specdec_linear", "ppppiiiiiii")(
        x.data_ptr(),
        data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        out_features,
        in_features,
        dtype,
        dtype,
        native.DTYPES[out.dtype],
        torch.get_num_threads(),
    )
    return out
