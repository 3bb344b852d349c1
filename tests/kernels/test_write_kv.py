"""Keys and values land in their slots, and nowhere else."""

import contextlib

import pytest
import torch

from specdec.kernels import native
from specdec.kernels.write_kv import write_kv


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tokens_land_in_their_slots_and_pads_nowhere(dtype: torch.dtype, is_native: bool) -> None:
    fused = torch.randn(5, 2, 3 + 8 + 5).to(dtype)
    k, v = fused[:, :, 3:11], fused[:, :, 11:]  # strided views, as out of one projection
    k_cache, v_cache = torch.zeros(4, 3, 2, 8, dtype=dtype), torch.zeros(4, 3, 2, 5, dtype=dtype)
    slots = torch.tensor([7, -1, 0, 11, -1])
    with contextlib.nullcontext() if is_native else native.disabled():
        write_kv(k, v, slots, k_cache, v_cache)
    for cache, rows in ((k_cache.flatten(0, 1), k), (v_cache.flatten(0, 1), v)):
        assert torch.equal(cache[[7, 0, 11]], rows[[0, 2, 3]])
        untouched = [s for s in range(12) if s not in (7, 0, 11)]
        assert not cache[untouched].any()


def test_a_prompt_large_enough_for_threads_lands_whole() -> None:
    k, v = torch.randn(600, 3, 64), torch.randn(600, 3, 64)
    k_cache, v_cache = torch.zeros(40, 16, 3, 64), torch.zeros(40, 16, 3, 64)
    slots = torch.randperm(640)[:600]
    write_kv(k, v, slots, k_cache, v_cache)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k) and torch.equal(v_cache.flatten(0, 1)[slots], v)


def test_fp8_holds_numbers_over_their_scale_within_half_a_step_and_saturates() -> None:
    k = torch.randn(4, 2, 64) * torch.tensor([0.01, 30.0])[:, None]
    k[0, 0, 0] = 1e6
    caches = [torch.zeros(1, 4, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = torch.tensor([0.001, 2.0])
    write_kv(k, k, torch.arange(4), *caches, scales, scales)
    read = caches[0][0].float() * scales[:, None]
    inside = (k / scales[:, None]).abs() <= 448
    error = (read - k).abs() <= k.abs() / 16 + scales[:, None] * 2.0**-10  # 3 bits behind the point, and steps of 2^-9
    assert error[inside].all() and read[0, 0, 0] == 448 * scales[0]


def test_arguments_that_do_not_fit_are_refused_with_a_sentence() -> None:
    k, slots, cache = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"k_cache is \(1, 4, 2, 7\)"):
        write_kv(k, k, slots, cache[..., :7], cache)
    with pytest.raises(ValueError, match="k is torch.float32 and its cache torch.float16"):
        write_kv(k, k, slots, cache.half(), cache)
    with pytest.raises(ValueError, match="only float8_e4m3fn has scales"):
        write_kv(k, k, slots, cache, cache, torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="one int64 is needed for each of 3 tokens"):
        write_kv(k, k, slots[:2], cache, cache)
