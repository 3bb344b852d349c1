"""Choice, prefix and rejection in Triton: the twin's words and uniforms bit for bit, its ids but for ties."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.accept import Judgement, accept, perturbed, reference, reject, sample
from specdec.kernels.accept.counted import uniform, words

TIE = 4e-6  # float32 scores this close may be ranked either way: their logarithms differ in the last bit
RAGGED = [1, 3, 0, 2]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@triton.jit
def draw_kernel(seed, position, words_ptr, uniforms_ptr, first, STREAM: tl.constexpr, TILE: tl.constexpr):
    drawn = words(tl.load(seed), tl.load(position), first, STREAM, TILE)
    at = tl.arange(0, TILE)
    tl.store(words_ptr + at, drawn.to(tl.int64))
    tl.store(uniforms_ptr + at, uniform(drawn, uniforms_ptr.dtype.element_ty))


def batch(
    sizes: list[int], vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `accept`; about two of three drafts are right, every third row is greedy."""
    generator = torch.Generator().manual_seed(seed + vocab_size)
    num_rows = sum(sizes)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 2).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**40, (num_rows,), generator=generator)
    temperatures = torch.rand(num_rows, generator=generator).to(torch.promote_types(dtype, torch.float32)) + 0.2
    temperatures[::3] = 0
    right, _ = reference.sample(logits, seeds, positions, temperatures)
    guesses = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    drafts = torch.where(torch.rand(num_rows, generator=generator) < 0.67, right, guesses)
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    return tuple(x.to(device) for x in (logits, seeds, positions, temperatures, drafts, bounds))  # type: ignore


def assert_judged_as_the_twin_does(arguments: tuple[Tensor, ...]) -> Judgement:
    """Equal ids, but for ties; then the same prefix and the same next token by the rule itself."""
    logits, seeds, positions, temperatures, drafts, bounds = arguments
    judged, twin = accept(*arguments), reference.accept(*arguments)
    scores = perturbed(logits, seeds, positions, temperatures)
    chosen = scores.gather(1, judged.token_ids[:, None])[:, 0]
    assert (scores.amax(1) - chosen <= (0 if scores.dtype == torch.float64 else TIE)).all()
    greedy = temperatures < 1e-5
    assert torch.equal(judged.token_ids[greedy], twin.token_ids[greedy]), "greedy rows admit no difference"
    assert torch.equal(judged.is_finite, twin.is_finite)
    for request, (first, end) in enumerate(pairwise(bounds.tolist())):
        row = first
        while row < end - 1 and judged.token_ids[row] == drafts[row]:
            row += 1
        assert judged.num_accepted[request] == row - first
        assert judged.next_ids[request] == (judged.token_ids[row] if end > first else 0)
    return judged


@pytest.mark.parametrize(("first", "stream"), [(0, 0), (4096, 0), (262144 - 64, 1), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_and_uniforms_have_the_bits_of_the_twin(
    first: int, stream: int, dtype: torch.dtype, device: torch.device
) -> None:
    for seed, position in ((0, 0), (-1, 2**40 + 3), (-(2**63), 7)):
        own, place = torch.tensor([seed], device=device), torch.tensor([position], device=device)
        drawn = torch.empty(64, dtype=torch.int64, device=device)
        uniforms = torch.empty(64, dtype=dtype, device=device)
        draw_kernel[(1,)](own, place, drawn, uniforms, first, STREAM=stream, TILE=64)
        expected = reference.bits(own, place, first + 64, stream)[0, first:]
        assert torch.equal(drawn, expected) and torch.equal(uniforms, reference.uniform(expected, dtype))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, torch.float64), (37, torch.bfloat16), (4097, torch.float32)])
def test_prefixes_are_the_twins(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_judged_as_the_twin_does(batch(RAGGED, vocab_size, dtype, device))


def test_prefixes_longer_than_a_pass_are_judged(device: torch.device) -> None:
    logits, seeds, positions, temperatures, drafts, bounds = batch([17, 20, 1], 5, torch.float64, device)
    right, _ = reference.sample(logits, seeds, positions, temperatures)
    drafts = right.clone()
    drafts[17 + 18] = (right[17 + 18] + 1) % 5
    judged = assert_judged_as_the_twin_does((logits, seeds, positions, temperatures, drafts, bounds))
    assert judged.num_accepted.tolist() == [16, 18, 0]


def test_rows_that_cannot_choose_are_told_apart(device: torch.device) -> None:
    logits = torch.randn(6, 100)
    logits[0, 3] = logits[4, 99] = float("nan")
    logits[1, 99] = float("inf")
    logits[2] = logits[3, :99] = -float("inf")
    seeds = torch.arange(6)
    for temperature in (0.0, 1.0):
        arguments = (logits.to(device), seeds.to(device), seeds.to(device), torch.full((6,), temperature).to(device))
        token_ids, is_finite = sample(*arguments)
        assert is_finite.tolist() == [False, False, False, True, False, True]
        assert token_ids[3] == 99 and token_ids[[0, 1, 2, 4]].eq(0).all()
    bounds = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    drafts = torch.tensor([0, 0, 0, 0, 1, 0], device=device)
    judged = accept(*arguments, drafts, bounds)
    twin = reference.accept(*arguments, drafts, bounds)
    assert judged.is_finite.tolist() == twin.is_finite.tolist() == [False, False]


def test_a_bad_row_behind_the_refused_draft_harms_nobody(device: torch.device) -> None:
    logits = torch.zeros(3, 8, device=device)
    logits[0, 5] = 1
    logits[2] = float("nan")
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    bounds = torch.tensor([0, 3], dtype=torch.int32, device=device)
    judged = accept(logits, zeros, zeros, torch.zeros(3, device=device), zeros + 1, bounds)
    assert judged.is_finite.tolist() == [True] and judged.next_ids.tolist() == [5]


def test_greedy_ties_go_to_the_lowest_id_across_tiles(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, [4100, 4095, 8999]] = 1
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    token_ids, _ = sample(logits, zeros, zeros, torch.zeros(2, device=device))
    assert token_ids.tolist() == [4095, 0]


def test_a_row_has_the_same_choice_in_any_company(device: torch.device) -> None:
    arguments = batch([1] * 4, 130, torch.float32, device)[:4]
    together, _ = sample(*arguments)
    for row in range(4):
        assert sample(*(x[row : row + 1] for x in arguments))[0][0] == together[row]


@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(37, torch.float64), (4097, torch.float32)])
def test_rejection_is_the_twins(vocab_size: int, dtype: torch.dtype, is_certain: bool, device: torch.device) -> None:
    scores, seeds, positions, _, _, bounds = batch(RAGGED, vocab_size, dtype, device)
    drafts = scores.argmax(1)  # likely enough that some are kept
    generator = torch.Generator().manual_seed(5)
    near = scores.cpu() + torch.randn(scores.shape, generator=generator).to(dtype)
    probs = None if is_certain else near.to(device).softmax(1)
    ours = reject(scores, probs, seeds, positions, drafts, bounds)
    twin = reference.reject(scores, probs, seeds, positions, drafts, bounds)
    assert all(torch.equal(a, b) for a, b in zip(ours, twin))


def test_a_draft_model_equal_to_the_target_is_never_refused(device: torch.device) -> None:
    """(p - q)+ is empty then; only the bonus is drawn."""
    scores, seeds, positions, _, _, bounds = batch([4], 33, torch.float64, device)
    kept = reject(scores, scores.softmax(1), seeds, positions, scores.argmax(1), bounds)
    assert kept.num_accepted.tolist() == [3] and kept.is_finite.all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 63, 4096, 4097, 8191, 50257, 262144])
def test_prefixes_are_the_twins_at_every_size(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    sizes = RAGGED if vocab_size < 50000 else [2]
    arguments = batch(sizes, vocab_size, dtype, device)
    assert_judged_as_the_twin_does(arguments)
    scores, seeds, positions, _, drafts, bounds = arguments
    wide = torch.promote_types(dtype, torch.float32)
    probs = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(device, wide).softmax(1)
    for q in (None, probs):
        ours = reject(scores, q, seeds, positions, drafts, bounds)
        assert all(
            torch.equal(a, b) for a, b in zip(ours, reference.reject(scores, q, seeds, positions, drafts, bounds))
        )


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 70), st.integers(0, 99))
def test_any_ragged_batch(device: torch.device, sizes: list[int], vocab_size: int, seed: int) -> None:
    assert_judged_as_the_twin_does(batch(sizes, vocab_size, torch.float64, device, seed))
