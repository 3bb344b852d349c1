"""The Triton engine of `write_kv`: its launch, which reads no value of a device tensor."""

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.write_kv.moving import write_kv_kernel

MOST_NUMBERS = 4096  # a program holds at most this many of K, and of V


def constants(groups: int, k_width: int, v_width: int, k_is_scaled: bool, v_is_scaled: bool) -> dict[str, Any]:
    """The compile-time arguments."""
    block_d, block_dv = triton.next_power_of_2(k_width), triton.next_power_of_2(v_width)
    block_g = max(1, min(triton.next_power_of_2(groups), MOST_NUMBERS // max(block_d, block_dv)))
    return {
        "GROUPS": groups, "D": k_width, "DV": v_width, "BLOCK_G": block_g, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        "HAS_K_SCALES": k_is_scaled, "HAS_V_SCALES": v_is_scaled,
    }  # fmt: skip


def write_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """As the twin."""
    num_tokens, groups, k_width = k.shape
    if not num_tokens:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    fixed = constants(groups, k_width, v.shape[2], k_scales is not None, v_scales is not None)
    write_kv_kernel[(num_tokens, triton.cdiv(groups, fixed["BLOCK_G"]))](
        k, v, slot_mapping.contiguous(), _bytes(k_cache), _bytes(v_cache),
        slot_mapping if k_scales is None else k_scales, slot_mapping if v_scales is None else v_scales,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), **fixed, num_warps=4,
    )  # fmt: skip


def _bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
