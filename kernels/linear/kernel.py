"""Calls into native/linear.cpp."""

import math

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.linear.groups import Groups

DTYPES = (torch.float32, torch.bfloat16)
GROUP_CODES = {4: 3, 8: 4}  # DType in vec.h, by the bits of a code
BYTE_CODES = {4: 5, 8: 6}  # likewise, where inputs are rounded to bytes
TILES, CODES_IN_TILES = 7, 8  # likewise, of bfloat16 and of 8-bit codes: inputs are rounded to bfloat16
KINDS = {
    0: "float32",
    1: "bfloat16",
    TILES: "bfloat16",
    CODES_IN_TILES: "8-bit codes",
    3: "4-bit codes",
    4: "8-bit codes",
    5: "4-bit codes",
    6: "8-bit codes",
}


class Arena:
    """Memory for the weights of one model, in large pages where the system has them.

    Weights are read once a step, and in small pages a quarter of that time goes into looking up pages. A chunk is freed
    with the last tensor in it; what is not yet taken of it costs nothing.
    """

    def __init__(self, chunk: int = 1 << 26) -> None:
        """Take memory in pieces of `chunk` bytes, or as large as a tensor wants them."""
        self._chunk = chunk
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that was not written to, on a cache line of its own."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = -(-num_bytes // 64) * 64
        if taken > len(self._rest):
            self._rest = torch.empty(max(taken, self._chunk), dtype=torch.uint8)
            native.function("specdec_ask_for_large_pages", "pi")(self._rest.data_ptr(), len(self._rest))
        found, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return found.view(dtype).view(shape)


def pack(weight: Tensor, arena: Arena | None = None) -> tuple[Tensor, int]:
    """weight [N, K], contiguous -> panels and their DType.

    Panels are [ceil(N / panel), K, panel], or tiles [ceil(N / panel), ceil(K / 32), panel / 16, 16, 16, 2] of 16 pairs
    of inputs and 16 outputs; padded with zeros.
    """
    out_features, in_features = weight.shape
    panel = native.function("specdec_panel", "", "i")()
    num_panels, code = -(-out_features // panel), native.DTYPES[weight.dtype]
    if weight.dtype == torch.bfloat16 and native.has_tiles():
        code = TILES
        shape: tuple[int, ...] = (num_panels, -(-in_features // 32), panel // 16, 16, 16, 2)
    else:
        shape = (num_panels, in_features, panel)
    packed = (arena or Arena(0)).empty(shape, weight.dtype)
    call = native.function("specdec_pack", "ppiiii")
    call(weight.data_ptr(), packed.data_ptr(), out_features, in_features, code, torch.get_num_threads())
    return packed, code


def pack_groups(groups: Groups, arena: Arena | None = None, code: int | None = None) -> Tensor:
    """codes [N, K] -> panels [ceil(N / panel), bytes] uint8; code: their DType, None for that of their bits."""
    out_features, in_features = groups.codes.shape
    code = code or GROUP_CODES[groups.num_bits]
    panel = native.function("specdec_panel", "", "i")()
    num_bytes = native.function("specdec_group_bytes", "ii", "i")(in_features, code)
    packed = (arena or Arena(0)).empty((-(-out_features // panel), num_bytes), torch.uint8)
    codes, d, m = (x.contiguous() for x in (groups.codes, groups.d, groups.m))
    pointers = (codes.data_ptr(), d.data_ptr(), m.data_ptr(), packed.data_ptr())
    call = native.function("specdec_pack_groups", "ppppiiii")
    call(*pointers, out_features, in_features, code, torch.get_num_threads())
    return packed


def linear(
    x: Tensor, data: Tensor, code: int, bias: Tensor | None, out_features: int, out: Tensor | None = None
) -> Tensor:
    """x [T, K], data panels whose DType is `code`, bias [N] float32 -> [T, N]."""
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
        code,
        native.DTYPES[out.dtype],
        torch.get_num_threads(),
    )
    return out
