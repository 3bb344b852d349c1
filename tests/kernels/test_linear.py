"""Packed linear layers: right at every shape, and the same bits for a token in any company."""

import pytest
import torch
from kernel_oracles import (
    WAYS,
    assert_as_good_as,
    assert_rows_do_not_notice_each_other,
    needs_native,
    needs_tiles,
)
from torch.nn import functional as F

from specdec.kernels import native
from specdec.kernels.linear import Quantization, groups, kernel, linear, pack, pack_groups, reference

SHAPES = [(1, 1), (32, 16), (33, 17), (31, 300), (96, 257), (160, 576)]  # N, K
DTYPES = [torch.float32, torch.bfloat16]


def make(N: int, K: int, dtype: torch.dtype, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(N * 1000 + K)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in [(N, K), (N,), (num_tokens, K)])  # type: ignore


@pytest.mark.parametrize(("dtype", "amx"), WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_as_good_as_pytorch(
    shape: tuple[int, int], dtype: torch.dtype, amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    for num_tokens in (1, 2, 7, 12, 13, 33, 100):
        weight, bias, x = make(*shape, dtype, num_tokens)
        for b in (bias, None):
            oracle = F.linear(x.double(), weight.double(), None if b is None else b.double())
            assert_as_good_as(linear(x, pack(weight, b)), F.linear(x, weight, b), oracle, floor=1e-5)


@needs_native
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
@pytest.mark.parametrize("shape", [(33, 17), (160, 576)])
def test_a_token_has_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, amx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    weight, bias, x = make(*shape, dtype, 40)
    packed = pack(weight, bias)
    assert_rows_do_not_notice_each_other(lambda rows: linear(rows, packed), x)
    _, _, many = make(*shape, dtype, 300)
    assert torch.equal(linear(many, packed)[:40], linear(many[:40], packed))


@needs_native
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, amx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    weight, bias, x = make(1000, 576, dtype, 9)  # enough work for a second thread
    packed = pack(weight, bias)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@needs_native
@pytest.mark.parametrize(("dtype", "amx"), WAYS)
def test_packing_loses_nothing(dtype: torch.dtype, amx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_AMX", amx)
    weight, _, _ = make(70, 19, dtype, 1)
    unpacked = reference.unpack(pack(weight).data, 70)
    assert torch.equal(unpacked[:, :19], weight) and not unpacked[:, 19:].any()


@needs_tiles
@pytest.mark.parametrize("shape", [*SHAPES, (40, 1537)])
def test_tiles_multiply_inputs_rounded_to_bfloat16(shape: tuple[int, int]) -> None:
    """Against the twin in float64, a float32 sum of K products may be off by K 2**-24 of their magnitudes."""
    for num_tokens in (1, 16, 17, 33, 70):
        weight, bias, _ = make(*shape, torch.bfloat16, 0)
        x = make(*shape, torch.float32, num_tokens)[2]
        data, code = kernel.pack(weight)
        assert code == kernel.TILES
        found = kernel.linear(x, data, code, bias.float(), shape[0], torch.empty(num_tokens, shape[0])).double()
        rounded = x.to(torch.bfloat16).double()
        bound = (rounded.abs() @ weight.double().abs().T + bias.double().abs()) * (shape[1] + 1) * 2**-24
        assert ((found - F.linear(rounded, weight.double(), bias.double())).abs() <= bound).all()
        assert torch.allclose(found.float(), reference.rounded_linear(x, weight, bias), atol=2 * bound.max().item())
        kept = F.linear(x.double(), weight.double(), bias.double())
        assert ((found - kept).abs() > bound).any(), "the check can tell rounded inputs from whole ones"


@needs_tiles
@pytest.mark.parametrize("shape", [(2, 32), (33, 96), (160, 576)])
def test_codes_in_tiles_multiply_inputs_rounded_to_bfloat16(shape: tuple[int, int]) -> None:
    """Against what codes stand for, with a bound as above: a sum of K products, and one of as many groups."""
    weight, bias, _ = make(*shape, torch.float32, 0)
    found = groups.to_groups(weight, 8)
    assert found is not None
    data, code = kernel.pack_groups(found, None, kernel.CODES_IN_TILES), kernel.CODES_IN_TILES
    codes = groups.decode(found).double()

    def run(x: torch.Tensor) -> torch.Tensor:
        return kernel.linear(x, data, code, bias, shape[0], torch.empty(len(x), shape[0]))

    x = make(*shape, torch.float32, 40)[2]
    rounded = x.to(torch.bfloat16).double()
    bound = (rounded.abs() @ codes.abs().T + bias.abs()) * (2 * shape[1] + 1) * 2**-24
    assert ((run(x) - F.linear(rounded, codes, bias.double())).abs() <= bound).all()
    assert ((run(x) - F.linear(x.double(), codes, bias.double())).abs() > bound).any()
    assert_rows_do_not_notice_each_other(run, x)


@needs_tiles
def test_tiles_keep_a_row_that_is_no_number_to_itself() -> None:
    weight, _, x = make(33, 40, torch.bfloat16, 20)
    packed = pack(weight)
    whole = linear(x, packed)
    x[2, 39], x[17, 0] = float("nan"), float("inf")
    broken = linear(x, packed)
    assert broken[2].isnan().all() and not broken[17].isfinite().any()
    others = [i for i in range(20) if i not in (2, 17)]
    assert torch.equal(broken[others], whole[others])


@needs_native
def test_without_tiles_bfloat16_weights_have_the_bits_of_float32_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = make(70, 300, torch.bfloat16, 15)
    wide = linear(x.float(), pack(weight.float(), bias.float())).to(torch.bfloat16)
    monkeypatch.setenv("SPECDEC_AMX", "0")
    packed = pack(weight, bias)
    assert torch.equal(linear(x, packed), wide)
    monkeypatch.setenv("SPECDEC_AMX", "1")
    assert torch.equal(linear(x, packed), wide), "a layer keeps the way it was packed for"
    monkeypatch.setenv("SPECDEC_AMX", "yes")
    with pytest.raises(ValueError, match="SPECDEC_AMX is 'yes'"):
        pack(weight)


@needs_native
def test_weights_of_one_arena_share_its_memory_and_nothing_else() -> None:
    arena = kernel.Arena(1 << 12)
    weights = [make(40, k, torch.float32, 0)[0] for k in (3, 5, 70)]  # the last is larger than what is left
    packed = [kernel.pack(weight, arena)[0] for weight in weights]
    assert all(data.data_ptr() % 64 == 0 for data in packed)
    assert packed[0].untyped_storage().data_ptr() == packed[1].untyped_storage().data_ptr()
    for weight, data in zip(weights, packed, strict=True):
        assert torch.equal(reference.unpack(data, 40), weight)


def from_codes(N: int, K: int, num_bits: int) -> torch.Tensor:
    """Weights as GGUF's Q4_1 or Q8_0 decode: scales and offsets are halves, each group uses its whole range."""
    generator = torch.Generator().manual_seed(N + K)
    d = (torch.rand(N, K // 32, 1, generator=generator) * 0.1 + 1e-4).half().float()
    if num_bits == 4:
        codes = torch.randint(0, 16, (N, K // 32, 32), generator=generator)
        codes[..., 0], codes[..., 1] = 0, 15
        return (codes * d + torch.randn(N, K // 32, 1, generator=generator).half().float()).view(N, K)
    codes = torch.randint(-127, 128, (N, K // 32, 32), generator=generator)
    codes[..., 5] = 127
    return (codes * d).view(N, K)


@needs_native
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("shape", [(2, 32), (33, 96), (160, 576)])
def test_weights_from_codes_are_held_as_codes_with_the_bits_of_float32(shape: tuple[int, int], num_bits: int) -> None:
    weight = from_codes(*shape, num_bits)
    weight[0, :32] = 0  # a group without a scale
    found = groups.find_groups(weight)
    assert found is not None and found.num_bits == num_bits and torch.equal(groups.decode(found), weight)
    _, bias, x = make(*shape, torch.float32, 30)
    packed = pack_groups(weight, bias)
    assert packed is not None and packed.data.nbytes <= pack(weight).data.nbytes * (0.17 if num_bits == 4 else 0.28)
    assert torch.equal(linear(x, packed), linear(x, pack(weight, bias)))
    assert torch.equal(linear(x[:1], packed), linear(x, packed)[:1])


@needs_native
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 32), (33, 96), (160, 576)])
def test_rounded_inputs_give_the_product_of_what_was_rounded(
    shape: tuple[int, int], num_bits: int, dtype: torch.dtype
) -> None:
    """Integer products are exact, so only the sums over groups round: as good as PyTorch on the rounded operands."""
    weight, bias, x = make(*shape, dtype, 20)
    x[3] = 0
    packed = pack_groups(weight, bias, Quantization(num_bits, rounds_inputs=True), dtype)
    found = groups.to_groups(weight, num_bits)
    assert packed is not None and found is not None and found.num_bits == num_bits
    rounded, codes = groups.round_inputs(x), groups.decode(found)
    oracle = F.linear(rounded.double(), codes.double(), bias.double())
    same = F.linear(rounded, codes, bias.float()).to(dtype)
    assert_as_good_as(linear(x, packed), same, oracle, floor=1e-4 if dtype == torch.float32 else 1e-3)
    assert_rows_do_not_notice_each_other(lambda rows: linear(rows, packed), x)
    kept = F.linear(x.double(), codes.double(), bias.double())
    assert (oracle - kept).abs().mean() < 0.01 * kept.abs().mean(), "bytes keep two digits of the inputs"
    assert (oracle - kept).abs().max() > 1e-4, "the check can tell rounded inputs from whole ones"


@needs_native
@pytest.mark.parametrize("num_bits", [4, 8])
def test_the_largest_codes_times_the_largest_bytes_do_not_overflow(num_bits: int) -> None:
    """All products of a group have one sign, and as many bits as they can have; a saturated sum would be far off."""
    weight = torch.ones(2, 64)
    weight[:, ::32] = 0 if num_bits == 4 else -1  # the range of 4-bit codes begins here: the others are 15
    packed = pack_groups(weight, None, Quantization(num_bits, rounds_inputs=True))
    found = groups.to_groups(weight, num_bits)
    assert packed is not None and found is not None
    assert found.codes.view(torch.int8).abs().max() == (15 if num_bits == 4 else 127)
    x = torch.stack([torch.ones(64), -torch.ones(64)]).repeat(4, 1)
    assert torch.allclose(linear(x, packed), F.linear(x, groups.decode(found)), rtol=1e-5)


@needs_native
def test_a_row_that_is_no_number_stays_none_and_leaves_the_others_alone() -> None:
    weight, _, x = make(33, 96, torch.float32, 9)
    packed = pack_groups(weight, None, Quantization(4, rounds_inputs=True))
    assert packed is not None
    whole = linear(x, packed)
    x[2, 40], x[7, 0] = float("nan"), float("inf")
    broken = linear(x, packed)
    assert broken[2].isnan().all() and broken[7].isnan().all()
    assert all(torch.equal(broken[i], whole[i]) for i in (0, 1, 3, 4, 5, 6, 8))


@pytest.mark.parametrize("num_bits", [4, 8])
def test_rounding_moves_no_weight_by_more_than_half_a_step(num_bits: int) -> None:
    weight = make(20, 96, torch.float32, 1)[0]
    found = groups.to_groups(weight, num_bits)
    assert found is not None
    step = found.d.float().repeat_interleave(32, 1)
    slack = 0.02 * step + 1e-3 * weight.abs()  # scales and least values are halves
    assert ((groups.decode(found) - weight).abs() <= step / 2 + slack).all()
    assert groups.to_groups(torch.randn(3, 40), num_bits) is None


def test_codes_that_are_wider_than_asked_for_are_rounded_and_narrower_ones_kept() -> None:
    eight, four = from_codes(4, 64, 8), from_codes(4, 64, 4)
    for weight, asked, given, is_kept in ((eight, 4, 4, False), (eight, 8, 8, True), (four, 8, 4, True)):
        found = groups.to_groups(weight, asked)
        assert found is not None and found.num_bits == given
        assert torch.equal(groups.decode(found), weight) == is_kept


def test_other_weights_are_not_taken_for_codes() -> None:
    weight = from_codes(4, 64, 4)
    weight[3, 63] += 1e-6
    assert groups.find_groups(weight) is None and groups.find_groups(torch.randn(4, 64)) is None
    assert groups.find_groups(torch.randn(4, 60)) is None


def test_doubles_and_empty_batches_work() -> None:
    weight, bias, x = make(5, 7, torch.float64, 3)
    assert torch.equal(linear(x, pack(weight, bias)), F.linear(x, weight, bias))
    assert linear(torch.empty(0, 7), pack(weight.float())).shape == (0, 5)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_result_lands_in_out(is_native: bool) -> None:
    weight, bias, x = make(40, 24, torch.float32, 3)
    if not is_native:
        with native.disabled():
            packed = pack(weight, bias)
    else:
        packed = pack(weight, bias)
    out = torch.full((3, 40), float("nan"))
    assert linear(x, packed, out) is out and torch.allclose(out, F.linear(x, weight, bias), atol=1e-5)


def test_a_summation_in_another_order_is_caught() -> None:
    """Negative control: an op whose bits depend on the batch must fail the invariance check."""
    x = torch.randn(5, 300)
    with pytest.raises(AssertionError, match="differ"):
        assert_rows_do_not_notice_each_other(lambda rows: rows.cumsum(0) * 0 + rows.sum(0) + rows, x)
