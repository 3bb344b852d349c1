"""Calls into native/elementwise.cpp."""

import torch
from torch import Tensor

from specdec.kernels import native


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """As the twin; everything contiguous."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    native.function("specdec_rms_norm", "ppppiifii")(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
        native.DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As the twin; gate_up contiguous."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    native.function("specdec_silu_mul", "ppiiii")(
        gate_up.data_ptr(),
        out.data_ptr(),
        out.numel() // width,
        width,
        native.DTYPES[gate_up.dtype],
        torch.get_num_threads(),
    )
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As the twin; heads contiguous, any stride between tokens."""
    call = native.function("specdec_rotary", "pppiiiiiii")
    for x in (q, k):
        num_tokens, heads, width = x.shape
        call(
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            heads,
            width,
            cos.shape[1],
            x.stride(0),
            native.DTYPES[x.dtype],
            torch.get_num_threads(),
        )
