"""The configurations of the kernels of `accept` that must compile: every dtype and width its doors accept."""

from typing import Any

import torch
import triton

from specdec.kernels.accept.choosing import choose_kernel, finish_kernel, judge_kernel
from specdec.kernels.accept.launch import NUM_WARPS, ROWS, TILE, tiles_of, wide_type
from specdec.kernels.accept.rejecting import coin_kernel, normalise_kernel, recover_kernel, residual_kernel
from specdec.kernels.ahead_of_time import CompileCase

_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VOCABULARIES = (49152, 128256, 262144)  # SmolLM2, Llama 3, Gemma 3
_SIZES = ("row_stride", "prob_stride", "V")  # of usual vocabularies, multiples of 16


def all_cases(space: bool = False) -> list[CompileCase]:
    """Each kernel and dtype the doors accept, with the tile counts of usual vocabularies; there is no search space."""
    cases = []
    for dtype in _NAMES:
        wide = wide_type(dtype)
        tiled = {"WIDE": wide, "TILE": TILE}
        cases.append(_case(choose_kernel, dtype, tiled, NUM_WARPS))
        cases.append(_case(normalise_kernel, dtype, tiled, NUM_WARPS))
        for is_certain in (True, False):
            cases.append(_case(residual_kernel, dtype, {**tiled, "IS_CERTAIN": is_certain}, NUM_WARPS))
        for vocab_size in _VOCABULARIES:
            tiles = {"S_POW2": triton.next_power_of_2(tiles_of(vocab_size))}
            cases.append(_case(coin_kernel, dtype, {"WIDE": wide, **tiles, "IS_CERTAIN": False}, 1))
            if dtype in (torch.float64, torch.float32):  # what scratch may be
                cases.append(_case(judge_kernel, dtype, {**tiles, "ROWS": ROWS}, 4))
                cases.append(_case(finish_kernel, dtype, {**tiles, "ROWS": ROWS}, 4))
                cases.append(_case(recover_kernel, dtype, tiles, 1))
    return cases


def _case(fn: Any, dtype: torch.dtype, constants: dict[str, Any], num_warps: int) -> CompileCase:
    scratch = "*fp64" if dtype == torch.float64 else "*fp32"
    types = {
        "logits_ptr": f"*{_NAMES[dtype]}", "scores_ptr": f"*{_NAMES[dtype]}", "probs_ptr": scratch,
        "temperatures_ptr": scratch, "tops_ptr": scratch, "sums_ptr": scratch, "log_sums_ptr": scratch,
        "ids_ptr": "*i32", "bounds_ptr": "*i32", "num_accepted_ptr": "*i32", "is_finite_ptr": "*i1",
        "L": "i32", "S": "i32", "V": "i32", "row_stride": "i32", "prob_stride": "i32",
    }  # fmt: skip
    names = [name for name in fn.arg_names if name not in constants]
    details = [f"{k}={v}" for k, v in constants.items() if k in ("S_POW2", "IS_CERTAIN")]
    return CompileCase(
        name=" ".join([f"accept.{fn.__name__.removesuffix('_kernel')}", _NAMES[dtype], *details]),
        fn=fn,
        signature={**{n: types.get(n, "*i64") for n in names}, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        num_warps=num_warps,
        multiples_of_16=tuple(n for n in names if n in _SIZES),
    )
