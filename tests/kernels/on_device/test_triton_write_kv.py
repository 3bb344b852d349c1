"""The Triton writer: every byte as the twin writes it, nothing where no token is, fp8 at all its edges."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.write_kv import reference, write_kv

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


def caches(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V, poisoned: what is not written stays NaN."""
    groups, k_width, v_width = shape
    made = (torch.full((3, 4, groups, width), float("nan")).to(device, dtype) for width in (k_width, v_width))
    return tuple(made)  # type: ignore[return-value]


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def assert_written_as_the_twin_does(
    shape: tuple[int, int, int], given: torch.dtype, stored: torch.dtype, device: torch.device
) -> None:
    groups, k_width, v_width = shape
    generator = torch.Generator().manual_seed(groups * k_width)
    fused = (torch.randn(5, groups, k_width + v_width + 1, generator=generator) * 3).to(device, given)
    k, v = fused[:, :, :k_width], fused[:, :, k_width + 1 :]  # views with odd strides
    slots = torch.tensor([7, -1, 0, 11, -1], device=device)
    scales = [None, None]
    if stored == FP8:
        scales = [torch.rand(groups, generator=generator).to(device) + 0.1 for _ in range(2)]  # type: ignore[misc]
    ours, twin = caches(shape, stored, device), caches(shape, stored, device)
    write_kv(k, v, slots, *ours, *scales)
    reference.write_kv(k, v, slots, *twin, *scales)
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(ours, twin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_land_in_their_slots_and_pads_nowhere(dtype: torch.dtype, device: torch.device) -> None:
    assert_written_as_the_twin_does((3, 48, 33), dtype, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_fp8_bytes_are_the_twins(dtype: torch.dtype, device: torch.device) -> None:
    assert_written_as_the_twin_does((3, 48, 33), dtype, FP8, device)


def test_fp8_at_its_edges(device: torch.device) -> None:
    """Every byte of the format, the midpoints between neighbours and their neighbours, and what is not a number."""
    exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-1e9, 1e9)]
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38, -449.0, 448.0, 464.0, 1e-40, -0.0])
    x = torch.cat([exact, middle, *near, odd]).to(device)
    k, one = x.view(1, 1, -1), torch.ones(1, device=device)
    ours, twin = (caches((1, len(x), len(x)), FP8, device) for _ in range(2))
    slot = torch.tensor([5], device=device)
    write_kv(k, k, slot, *ours, one, one)
    reference.write_kv(k, k, slot, *twin, one, one)
    assert torch.equal(as_bytes(ours[0]), as_bytes(twin[0]))
    assert torch.equal(ours[0].flatten()[5 * len(x) :][: len(exact)].float(), exact.to(device))


def test_no_tokens_write_nothing(device: torch.device) -> None:
    k_cache, v_cache = caches((2, 8, 8), torch.float32, device)
    empty = torch.empty(0, 2, 8, device=device)
    write_kv(empty, empty, torch.empty(0, dtype=torch.int64, device=device), k_cache, v_cache)
    assert k_cache.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32, 32), (8, 64, 64), (5, 80, 80), (8, 128, 128), (3, 192, 128), (16, 256, 256)])
def test_every_head_width(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    assert_written_as_the_twin_does(shape, dtype, dtype, device)
    if dtype != torch.float64:
        assert_written_as_the_twin_does(shape, dtype, FP8, device)
