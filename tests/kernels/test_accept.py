"""Shared noise: known words, one meaning in both implementations, and the law it must follow."""

import pytest
import torch
from kernel_oracles import needs_native

from specdec.kernels import native
from specdec.kernels.accept import DRAFT_POSITIONS, accept, kernel, noise, perturbed, reference, reject, sample

SEEDS = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
POSITIONS = torch.tensor([0, 1, 7, 2**40 + 3, 123456])
SIZES = [1, 3, 4, 63, 64, 65, 1000]


@pytest.mark.parametrize(
    ("word", "expected"),
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_gives_the_known_answers_of_random123(word: int, expected: str) -> None:
    one = torch.tensor([word])
    assert " ".join(f"{int(w):08x}" for w in reference.philox((one, one, one, one), (one, one))) == expected


@needs_native
@pytest.mark.parametrize("vocab_size", SIZES)
def test_native_words_equal_the_twin(vocab_size: int) -> None:
    assert torch.equal(kernel.bits(SEEDS, POSITIONS, vocab_size), reference.bits(SEEDS, POSITIONS, vocab_size))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [*SIZES, 8192, 8193, 20000])
def test_native_chooses_what_the_twin_chooses(vocab_size: int, dtype: torch.dtype) -> None:
    """Float32 noise may differ in the last bit, so an id may differ only where the scores tie to that bit."""
    logits = (torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3).to(dtype)
    temperatures = torch.tensor([0.0, 9e-6, 0.5, 1.0, 2.0])
    token_ids, is_finite = sample(logits, SEEDS, POSITIONS, temperatures)
    scores = perturbed(logits, SEEDS, POSITIONS, temperatures)
    chosen = scores.gather(1, token_ids[:, None])[:, 0]
    assert is_finite.all() and (scores.amax(1) - chosen <= 4e-6).all()
    with native.disabled():
        twin, _ = sample(logits, SEEDS, POSITIONS, temperatures)
    assert torch.equal(token_ids[:2], twin[:2]), "greedy rows admit no difference"


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_that_cannot_choose_say_so_and_masked_tokens_are_never_chosen(
    dtype: torch.dtype, temperature: float, is_native: bool
) -> None:
    logits = torch.randn(6, 100)
    logits[0, 3] = logits[4, 99] = float("nan")
    logits[1, 99] = float("inf")
    logits[2] = logits[3, :99] = -float("inf")
    seeds = torch.arange(6)
    if is_native:
        token_ids, is_finite = sample(logits.to(dtype), seeds, seeds, torch.full((6,), temperature))
    else:
        with native.disabled():
            token_ids, is_finite = sample(logits.to(dtype), seeds, seeds, torch.full((6,), temperature))
    assert is_finite.tolist() == [False, False, False, True, False, True]
    assert token_ids[3] == 99 and token_ids[[0, 1, 2, 4]].eq(0).all()


@pytest.mark.parametrize("is_native", [True, False])
def test_greedy_ties_go_to_the_lowest_id(is_native: bool) -> None:
    logits = torch.zeros(3, 20000)
    logits[0, [777, 778, 19999]] = 1
    logits[1, [16000, 9000]] = 1
    with native.disabled() if not is_native else torch.no_grad():
        token_ids, _ = sample(logits, SEEDS[:3], POSITIONS[:3], torch.zeros(3))
    assert token_ids.tolist() == [777, 9000, 0]


def test_a_row_does_not_notice_the_others() -> None:
    logits = torch.randn(7, 9000)
    seeds, temperatures = torch.arange(7), torch.linspace(0, 2, 7)
    together, _ = sample(logits, seeds, seeds, temperatures)
    for row in range(7):
        one = slice(row, row + 1)
        assert sample(logits[one], seeds[one], seeds[one], temperatures[one])[0][0] == together[row]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def test_choices_follow_the_softmax_and_a_wrong_temperature_is_caught() -> None:
    """4 degrees of freedom: above 33 is a false alarm of one in a million; the seeds are fixed besides."""
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    num = 20000
    seeds = torch.full((num,), 11)
    positions = torch.arange(num)
    token_ids, _ = sample(row.expand(num, -1).contiguous(), seeds, positions, torch.full((num,), 0.7))
    counts = token_ids.bincount(minlength=5).double()
    assert chi_square(counts, (row / 0.7).softmax(0).double()) < 33
    assert chi_square(counts, row.softmax(0).double()) > 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_at_both_ends_of_the_words(dtype: torch.dtype) -> None:
    values = noise(torch.arange(50), torch.arange(50), 4096, dtype)
    assert values.dtype == dtype and values.isfinite().all() and abs(values.mean().item() - 0.5772) < 0.02


def test_the_prefix_that_agrees_is_kept_and_padding_owns_nothing() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1, 5]), 8).double()
    zeros = torch.zeros(5, dtype=torch.int64)
    drafts, bounds = torch.tensor([3, 2, 0, 1, 0]), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    judged = accept(logits, zeros, zeros, torch.zeros(5), drafts, bounds)
    assert judged.token_ids.tolist() == [3, 1, 4, 1, 5] and judged.num_accepted.tolist() == [1, 0, 1]
    assert judged.next_ids.tolist() == [1, 0, 5] and judged.is_finite.all()


P = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
Q = torch.tensor([0.0, 1.0, 0.3, 1.0, -2.0])


def rejected_tokens(declared: torch.Tensor | None, drawn: torch.Tensor, num: int = 20000) -> torch.Tensor:
    """The token at the first place of `num` requests with one draft each, drawn from softmax(drawn)."""
    seeds, positions = torch.full((2 * num,), 3), torch.arange(num).repeat_interleave(2)
    noisy = drawn + noise(seeds[::2], positions[::2] + DRAFT_POSITIONS, 5)
    drafts = noisy.argmax(1).repeat_interleave(2)
    probs = None if declared is None else declared.softmax(0).expand(2 * num, -1).contiguous()
    if probs is not None:
        probs[1::2] = 0  # behind a last row nothing was drawn
    bounds = torch.arange(0, 2 * num + 1, 2, dtype=torch.int32)
    kept = reject(P.expand(2 * num, -1).contiguous(), probs, seeds, positions, drafts, bounds)
    assert kept.is_finite.all()
    return torch.where(kept.num_accepted > 0, drafts[::2], kept.next_ids).bincount(minlength=5).double()


def test_rejection_follows_the_target_and_a_draft_that_lies_is_caught() -> None:
    """4 degrees of freedom: above 33 is a false alarm of one in a million; the seeds are fixed besides."""
    target = P.softmax(0).double()
    assert chi_square(rejected_tokens(Q, Q), target) < 33
    assert chi_square(rejected_tokens(P, Q), target) > 1000, "declared P, drawn from Q"


def test_behind_a_draft_that_could_not_ride_follows_the_residual() -> None:
    """q in a request's last row: one more was drawn there and counts as refused; the same alarm as above."""
    num = 20000
    seeds, positions = torch.full((num,), 3), torch.arange(num)
    q = Q.softmax(0).expand(num, -1).contiguous()
    bounds = torch.arange(num + 1, dtype=torch.int32)
    kept = reject(P.expand(num, -1).contiguous(), q, seeds, positions, torch.zeros_like(seeds), bounds)
    rest = (P.softmax(0) - Q.softmax(0)).clamp_min(0).double()
    counts = kept.next_ids.bincount(minlength=5).double()
    assert not counts[rest == 0].any() and not kept.num_accepted.any()
    assert chi_square(counts[rest > 0], (rest / rest.sum())[rest > 0]) < 33


def test_rejection_of_certain_drafts_follows_the_target() -> None:
    """One-hot q, whatever it points at; the same alarm as above."""
    assert chi_square(rejected_tokens(None, torch.tensor([9.0, -9, -9, -9, -9])), P.softmax(0).double()) < 33


def test_arguments_that_do_not_fit_are_refused_with_a_sentence() -> None:
    logits, ids, bounds = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2], dtype=torch.int32)
    floats = torch.zeros(2)
    with pytest.raises(ValueError, match="drafts are torch.int32; they must be int64"):
        accept(logits, ids, ids, floats, ids.int(), bounds)
    with pytest.raises(ValueError, match="bounds are torch.int64"):
        accept(logits, ids, ids, floats, ids, bounds.long())
    with pytest.raises(ValueError, match="seeds have shape"):
        accept(logits, ids[:1], ids, floats, ids, bounds)
    with pytest.raises(ValueError, match="draft_probs is"):
        reject(logits, torch.zeros(2, 4), ids, ids, ids, bounds)
