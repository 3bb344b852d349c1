"""Linear layers for few tokens: weights packed once, read once a call, the same bits for a token in any company."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.linear import groups, kernel, reference


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The weights of one layer, held once, in the order the implementation reads them."""

    data: Tensor  # packed: panels; plain: [N, K]
    bias: Tensor | None  # [N]; float32 where packed, the weight's dtype where plain
    out_features: int
    in_features: int
    dtype: torch.dtype  # of inputs and outputs
    code: int | None  # DType of packed panels, see native/vec.h; None where plain


def pack_groups(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """Hold a weight as 4- or 8-bit codes if it is exactly what such codes stand for (GGUF's Q4_1, Q8_0); else None.

    weight  [N, K]   float32
    bias    [N]      or None

    `linear` of it has the bits of `linear` of the float32 weight, from a fifth to a quarter of the memory.
    """
    if not (weight.is_cpu and native.enabled()):
        return None
    found = groups.find_groups(weight)
    if found is None:
        return None
    wide_bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
    code = kernel.GROUP_CODES[found.num_bits]
    shape = (weight.shape[0], weight.shape[1])
    return PackedLinear(kernel.pack_groups(found), wide_bias, *shape, torch.float32, code)


def pack(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> PackedLinear:
    """Lay out a weight for `linear`; the result shares no memory with it where native code will read it.

    weight  [N, K]
    bias    [N]     or None
    dtype           what to store and compute in; None keeps the weight's
    """
    assert weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])
    dtype = dtype or weight.dtype
    weight = weight.detach().to(dtype)
    shape = (weight.shape[0], weight.shape[1])
    if dtype in kernel.DTYPES and weight.is_cpu and native.enabled():
        wide_bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        return PackedLinear(
            kernel.pack(weight.contiguous()), wide_bias, weight.shape[0], weight.shape[1], dtype, native.DTYPES[dtype]
        )
    bias = None if bias is None else bias.detach().to(dtype)
    return PackedLinear(weight, bias, *shape, dtype, None)


def linear(x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """Return x W^T + b, summed in float32 (float64 stays float64).

    x        [T, K]   of the packed dtype
    out      [T, N]   contiguous, written in place of a new tensor
    returns  [T, N]   the bits of a row do not depend on the other rows where native code runs
    """
    assert x.ndim == 2 and x.shape[1] == packed.in_features and x.dtype == packed.dtype
    assert out is None or (out.shape == (x.shape[0], packed.out_features) and out.is_contiguous())
    if packed.code is None:
        return reference.linear(x, packed.data, packed.bias, out)
    return kernel.linear(x, packed.data, packed.code, packed.bias, packed.out_features, out)
