"""Weights that came out of groups of 32 codes: found again in their floats, and held as codes.

GGUF's Q4_1 stores w = d * code + m with 4-bit codes, Q8_0 stores w = d * code with 8-bit ones; d and m are halves.
A checkpoint decoded from them is larger, not richer: where every float of a weight is such a product, codes say the
same in a fifth of the bytes, and multiplying them gives the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 32  # inputs in a group
_ROWS_AT_ONCE = 256  # so that the ten passes over them find them in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Codes and what they stand for: w = d * code + m."""

    codes: Tensor  # [N, K] uint8; of 8-bit codes, the two's complement
    d: Tensor  # [N, K / 32] float16
    m: Tensor  # [N, K / 32] float16; zero for 8-bit codes
    num_bits: int  # 4 or 8


def find_groups(weight: Tensor) -> Groups | None:
    """Return codes that stand for exactly these floats, 4-bit ones if there are; None if there are not.

    weight  [N, K] float32
    """
    if weight.dtype != torch.float32 or weight.shape[1] % SIZE:
        return None
    for find, num_bits in ((_find_4, 4), (_find_8, 8)):
        parts = []
        for rows in torch.split(weight.detach(), _ROWS_AT_ONCE):
            part = find(rows.reshape(len(rows), -1, SIZE))
            if part is None:
                break
            parts.append(part)
        else:
            codes, d, m = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            return Groups(codes.view(weight.shape), d.squeeze(-1), m.squeeze(-1), num_bits)
    return None


def to_groups(weight: Tensor, num_bits: int, keeps_narrower: bool = True) -> Groups | None:
    """Return the codes a weight is made of, if they are no wider than `num_bits`, else the nearest ones of that width.

    None where groups do not fit its width.

    weight          [N, K]   any floating type
    keeps_narrower  codes of fewer bits may come back
    """
    if weight.shape[1] % SIZE:
        return None
    wide = weight.detach().to(torch.float32)
    found = find_groups(wide)
    if found is not None and (found.num_bits == num_bits or (keeps_narrower and found.num_bits < num_bits)):
        return found
    return _round(wide.view(len(wide), -1, SIZE), num_bits)


def _round(w: Tensor, num_bits: int) -> Groups:
    """w [N, groups, 32]: as GGUF's quantiser rounds, a group's range or largest magnitude spread over the codes."""
    if num_bits == 4:
        m = w.amin(-1, keepdim=True).half()
        d = ((w.amax(-1, keepdim=True) - m.float()) / 15).half()
        codes = ((w - m.float()) / d.float()).nan_to_num(0, 0, 0).round().clamp(0, 15).to(torch.uint8)
    else:
        d = (w.abs().amax(-1, keepdim=True) / 127).half()
        m = torch.zeros_like(d)
        codes = (w / d.float()).nan_to_num(0, 0, 0).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return Groups(codes.reshape(len(w), -1), d.squeeze(-1), m.squeeze(-1), num_bits)


def decode(groups: Groups) -> Tensor:
    """Return the weight [N, K] float32 that codes stand for."""
    codes = groups.codes if groups.num_bits == 4 else groups.codes.view(torch.int8)
    wide = codes.float().view(len(codes), -1, SIZE)
    return (wide * groups.d.float()[..., None] + groups.m.float()[..., None]).view(codes.shape)


def round_inputs(x: Tensor) -> Tensor:
    """Return what is left of inputs [T, K] when groups of 32 become bytes of one scale each.

    The largest magnitude of a group is 127; halves go to even. (The scheme of llama.cpp's Q8_0 activations.)
    """
    grouped = x.to(torch.float32).view(len(x), -1, SIZE)
    largest = grouped.abs().amax(-1, keepdim=True)
    codes = (grouped.double() * (127 / largest)).nan_to_num(0, 0, 0).round().float()
    return (codes * (largest / 127)).view(x.shape)


Found = tuple[Tensor, Tensor, Tensor] | None


def _find_4(w: Tensor) -> Found:
    """w [N, groups, 32]: the least has code 0 and the greatest 15, as the quantiser chose them."""
    m = w.amin(-1, keepdim=True).half()
    d = ((w.amax(-1, keepdim=True) - m.float()) / 15).half()
    codes = ((w - m.float()) / d.float()).nan_to_num(0, 0, 0).round().clamp(0, 15)
    return (codes.to(torch.uint8), d, m) if torch.equal(codes * d.float() + m.float(), w) else None


def _find_8(w: Tensor) -> Found:
    """w [N, groups, 32]: the greatest magnitude has code 127 or -127."""
    d = (w.abs().amax(-1, keepdim=True) / 127).half()
    codes = (w / d.float()).nan_to_num(0, 0, 0).round().clamp(-128, 127)
    if not torch.equal(codes * d.float(), w):
        return None
    return codes.to(torch.int8).view(torch.uint8), d, torch.zeros_like(d)
