"""The configurations of the kernels of `write_kv` that must compile: every dtype and width its doors accept."""

import torch

from specdec.kernels.ahead_of_time import CompileCase
from specdec.kernels.write_kv.launch import constants
from specdec.kernels.write_kv.moving import write_kv_kernel

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "u8",
}


def all_cases(space: bool = False) -> list[CompileCase]:
    """One case for each head width and pair of dtypes the door accepts; there is no search space."""
    pairs = [(x, x) for x in _NAMES if x != torch.float8_e4m3fn]
    pairs += [(x, torch.float8_e4m3fn) for x in (torch.float32, torch.bfloat16, torch.float16)]
    cases = []
    for given, stored in pairs:
        for width in (32, 64, 80, 96, 128, 192, 256):
            cases.append(_case(width, width, given, stored))
        cases.append(_case(192, 128, given, stored))
    return cases


def _case(k_width: int, v_width: int, given: torch.dtype, stored: torch.dtype) -> CompileCase:
    is_scaled = given != stored
    x, cache = f"*{_NAMES[given]}", f"*{_NAMES[stored]}"
    scales = "*fp32" if is_scaled else "*i64"
    fixed = constants(8, k_width, v_width, is_scaled, is_scaled)
    dtypes = _NAMES[given] + (" to fp8" if is_scaled else "")
    return CompileCase(
        name=f"write_kv d{k_width}{'' if v_width == k_width else f'/{v_width}'} {dtypes}",
        fn=write_kv_kernel,
        signature={
            "k_ptr": x, "v_ptr": x, "slots_ptr": "*i64", "k_cache_ptr": cache, "v_cache_ptr": cache,
            "k_scales_ptr": scales, "v_scales_ptr": scales,
            **dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"), "i32"),
            **dict.fromkeys(fixed, "constexpr"),
        },
        constexprs=fixed,
        unaligned=("slots_ptr",),
    )  # fmt: skip
