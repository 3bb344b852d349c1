"""Norms, gates and rotations round where transformers' Llama rounds, and a token does not notice its neighbours."""

import pytest
import torch
from kernel_oracles import assert_as_good_as, assert_rows_do_not_notice_each_other, needs_native
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.elementwise import reference, rms_norm, rotary, silu_mul

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 16, 50, 576]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_as_good_as_the_twin(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(9, width, dtype=dtype), randn(width, dtype=dtype)
    residual = randn(9, width, dtype=dtype) * 2
    for given in (None, residual):
        ours, theirs = (None if given is None else given.clone() for _ in range(2))
        summed = x if given is None else given + x
        oracle = reference.rms_norm(summed.double(), weight.double(), 1e-5)
        out, twin = rms_norm(x, weight, 1e-5, ours), reference.rms_norm(x, weight, 1e-5, theirs)
        assert_as_good_as(out, twin, oracle)
        assert ours is None or torch.equal(ours, theirs), "the residual is the same sum"


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_is_as_good_as_the_twin(width: int, dtype: torch.dtype) -> None:
    x = randn(9, 2 * width, dtype=dtype) * 4
    assert_as_good_as(silu_mul(x), reference.silu_mul(x), reference.silu_mul(x.double()))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rotary_width"), [(64, 64), (64, 32), (20, 10), (2, 2)])
def test_rotary_equals_the_twin(width: int, rotary_width: int, dtype: torch.dtype) -> None:
    fused = randn(5, 6, width, dtype=dtype)
    cos, sin = randn(5, rotary_width, dtype=dtype), randn(5, rotary_width + 1, dtype=dtype)[:, 1:].contiguous()
    ours, twin = fused.clone(), fused.clone()
    rotary(ours[:, :4], ours[:, 4:], cos, sin)
    reference.rotary(twin[:, :4], twin[:, 4:], cos, sin)
    assert torch.equal(ours, twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, weight = randn(20, 576, dtype=dtype), randn(576, dtype=dtype)
    if native.enabled():
        assert_rows_do_not_notice_each_other(lambda rows: rms_norm(rows, weight, 1e-5), x)
        assert_rows_do_not_notice_each_other(silu_mul, x)
