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
