"""The Triton engine of `write_kv`: its launch, and what it is compiled for. No device value is read here."""

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.ahead_of_time import CompileCase
from specdec.kernels.write_kv.moving import write_kv_kernel

MOST_NUMBERS = 4096  # a program holds at most this many of K, and of V

TRITON_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "u8",
}


def _constants(groups: int, k_width: int, v_width: int, k_is_scaled: bool, v_is_scaled: bool) -> dict[str, Any]:
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
    constants = _constants(groups, k_width, v.shape[2], k_scales is not None, v_scales is not None)
    write_kv_kernel[(num_tokens, triton.cdiv(groups, constants["BLOCK_G"]))](
        k, v, slot_mapping.contiguous(), _bytes(k_cache), _bytes(v_cache),
        slot_mapping if k_scales is None else k_scales, slot_mapping if v_scales is None else v_scales,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), **constants, num_warps=4,
    )  # fmt: skip


def _bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def compile_cases() -> list[CompileCase]:
    """One case for each head width and pair of dtypes the door accepts."""
    pairs = [(x, x) for x in TRITON_NAMES if x != torch.float8_e4m3fn]
    pairs += [(x, torch.float8_e4m3fn) for x in (torch.float32, torch.bfloat16, torch.float16)]
    cases = []
    for given, stored in pairs:
        for width in (32, 64, 80, 96, 128, 192, 256):
            cases.append(_case(width, width, given, stored))
        cases.append(_case(192, 128, given, stored))
    return cases


def _case(k_width: int, v_width: int, given: torch.dtype, stored: torch.dtype) -> CompileCase:
    is_scaled = given != stored
    x, cache = f"*{TRITON_NAMES[given]}", f"*{TRITON_NAMES[stored]}"
    scales = "*fp32" if is_scaled else "*i64"
    constants = _constants(8, k_width, v_width, is_scaled, is_scaled)
    dtypes = TRITON_NAMES[given] + (" to fp8" if is_scaled else "")
    return CompileCase(
        name=f"write_kv d{k_width}{'' if v_width == k_width else f'/{v_width}'} {dtypes}",
        fn=write_kv_kernel,
        signature={
            "k_ptr": x, "v_ptr": x, "slots_ptr": "*i64", "k_cache_ptr": cache, "v_cache_ptr": cache,
            "k_scales_ptr": scales, "v_scales_ptr": scales,
            **dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constexprs=constants,
    )  # fmt: skip
