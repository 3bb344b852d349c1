"""Placing keys and values in the paged cache, as they are or quantised to fp8."""

import torch
from torch import Tensor

from specdec.kernels import dispatch, native
from specdec.kernels.ahead_of_time import CompileCase
from specdec.kernels.write_kv import kernel, reference

TRITON_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def write_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Place this step's keys and values in the paged cache, in place.

    k             [T, G, D]                         any strides, as long as D is contiguous; rotated already
    v             [T, G, Dv]
    slot_mapping  [T]                               int64, block * block_size + offset; PAD_SLOT (-1) is skipped
    k_cache       [num_blocks, block_size, G, D]    of k's dtype, or float8_e4m3fn with scales
    v_cache       [num_blocks, block_size, G, Dv]
    k_scales      [G]                               float32; what is stored is k / scale, rounded to nearest even and
    v_scales      [G]                               held at +-448, the largest number of the format

    ValueError names what does not fit.
    """
    _check(k, v, slot_mapping, k_cache, v_cache)
    _check_dtypes("k", k, k_cache, k_scales)
    _check_dtypes("v", v, v_cache, v_scales)
    if dispatch.wants_triton(k, _refusal(k)):
        from specdec.kernels.write_kv import launch

        launch.write_kv(k, v, slot_mapping, k_cache, v_cache, k_scales, v_scales)
        return
    on_cpu = k.is_cpu and k_scales is None and v_scales is None and k.stride(2) == 1 and v.stride(2) == 1
    if on_cpu and slot_mapping.is_contiguous() and native.enabled():
        kernel.write_kv(k, v, slot_mapping, k_cache, v_cache)
    else:
        reference.write_kv(k, v, slot_mapping, k_cache, v_cache, k_scales, v_scales)


def compile_cases(space: bool = False) -> list[CompileCase]:
    """Return what must compile ahead of time; there is no search space."""
    from specdec.kernels.write_kv.configurations import all_cases

    return all_cases(space)


def _refusal(k: Tensor) -> str | None:
    """Say why the Triton engine cannot take these tensors."""
    if k.dtype not in TRITON_DTYPES:
        return f"k is {k.dtype}; the kernel of `write_kv` knows {', '.join(map(str, TRITON_DTYPES))}"
    return None


def _check(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}; they must be [T, G, D] and [T, G, Dv]")
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}; one int64 is needed for each "
            f"of {k.shape[0]} tokens"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if cache.ndim != 4 or cache.shape[2:] != x.shape[1:] or not cache.is_contiguous():
            raise ValueError(
                f"{name}_cache is {tuple(cache.shape)} with strides {cache.stride()}; it must be contiguous, "
                f"[num_blocks, block_size, {x.shape[1]}, {x.shape[2]}]"
            )
    if not k.device == v.device == slot_mapping.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"k is on {k.device}, v on {v.device}, slot_mapping on {slot_mapping.device}, the caches on "
            f"{k_cache.device} and {v_cache.device}; they must share a device"
        )


def _check_dtypes(name: str, x: Tensor, cache: Tensor, scales: Tensor | None) -> None:
    if scales is None:
        if x.dtype != cache.dtype:
            raise ValueError(f"{name} is {x.dtype} and its cache {cache.dtype}; without scales they must be alike")
        return
    if cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}_scales are given for a cache of {cache.dtype}; only float8_e4m3fn has scales")
    if scales.shape != x.shape[1:2] or scales.dtype != torch.float32 or scales.device != x.device:
        raise ValueError(
            f"{name}_scales are {scales.dtype} of shape {tuple(scales.shape)} on {scales.device}; one float32 is "
            f"needed for each of {x.shape[1]} KV heads on {x.device}"
        )
