"""Linear layers for few tokens: weights packed once, read once a call, the same bits for a token in any company."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.linear import groups, kernel, reference


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a layer's weights are held, and what its products are made of.

    num_bits        4 or 8, of the codes in groups of 32; a weight that already is made of codes no wider keeps its own
    rounds_inputs   inputs become bytes, a scale a token and group, and products are those of integers
    """

    num_bits: int
    rounds_inputs: bool = False

    def code(self, num_bits: int) -> int:
        """DType of panels, see native/vec.h."""
        return (kernel.BYTE_CODES if self.rounds_inputs else kernel.GROUP_CODES)[num_bits]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The weights of one layer, held once, in the order the implementation reads them."""

    data: Tensor  # packed: panels; plain: [N, K]
    bias: Tensor | None  # [N]; float32 where packed, the weight's dtype where plain
    out_features: int
    in_features: int
    dtype: torch.dtype  # of inputs and outputs
    code: int | None  # DType of packed panels, see native/vec.h; None where plain

    @property
    def kind(self) -> str:
        """How the weights are held, in words."""
        return str(self.dtype).removeprefix("torch.") if self.code is None else kernel.KINDS[self.code]


def pack_groups(
    weight: Tensor,
    bias: Tensor | None = None,
    quantization: Quantization | None = None,
    dtype: torch.dtype = torch.float32,
    arena: kernel.Arena | None = None,
) -> PackedLinear | None:
    """Hold a weight as 4- or 8-bit codes; None where that is impossible: another width than 32 divides, no native code.

    weight        [N, K]
    bias          [N]      or None
    quantization  rounds the weight where it must; None: only if a float32 weight is exactly what codes stand for
    dtype         of inputs and outputs
    arena         memory for the codes; None: their own

    Unless inputs are rounded, `linear` of it has the bits of `linear` of the float32 weight that the codes stand for,
    from a fifth to a quarter of the memory.
    """
    if not (weight.is_cpu and native.enabled()):
        return None
    found = groups.find_groups(weight) if quantization is None else groups.to_groups(weight, quantization.num_bits)
    if found is None:
        return None
    wide_bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
    code = (quantization or Quantization(found.num_bits)).code(found.num_bits)
    shape = (weight.shape[0], weight.shape[1])
    return PackedLinear(kernel.pack_groups(found, arena), wide_bias, *shape, dtype, code)


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
        panels, code = kernel.pack(weight.contiguous())
        return PackedLinear(panels, wide_bias, *shape, dtype, code)
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
