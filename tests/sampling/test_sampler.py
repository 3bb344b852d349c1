"""The shared-noise sampler: lawful, reproducible, and the same whoever asks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.request import Request
from specdec.sampling import Choice, choose
from specdec.sampling.filters import Limits, keep
from specdec.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0], dtype=torch.float64)
CHI2_BOUND = 45.0
"""With 7 degrees of freedom chi-square exceeds 45 with probability 1.4e-7; the seeds are fixed besides."""


def _draw(params: dict[str, object], count: int, logits: Tensor = LOGITS, position: int = 0) -> list[int]:
    own = SamplingParams(**params)  # type: ignore[arg-type]
    choices = [Choice(Request(str(i), [1], own, noise_seed=i), position) for i in range(count)]
    return choose(logits.expand(count, -1).clone(), choices)[0]


def _law(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The law by hand, over a sorted list."""
    order = sorted(range(8), key=lambda i: (-float(LOGITS[i]), i))
    weights = [math.exp(float(LOGITS[i]) / temperature) for i in order][: top_k or 8]
    total, mass, kept = sum(weights), 0.0, 0
    for kept, weight in enumerate(weights, start=1):  # noqa: B007
        mass += weight / total
        if mass >= top_p:
            break
    weights = weights[:kept]
    law = [0.0] * 8
    for i, weight in zip(order, weights, strict=False):
        law[i] = weight / sum(weights)
    return law


def chi_square(draws: list[int], law: list[float]) -> float:
    """Pearson's statistic; infinite where an impossible token was drawn."""
    counts = [draws.count(i) for i in range(len(law))]
    if any(c and not p for c, p in zip(counts, law, strict=True)):
        return math.inf
    n = len(draws)
    return sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, law, strict=True) if p)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}]
)
def test_draws_follow_the_law(params: dict[str, float]) -> None:
    law = _law(**params)  # type: ignore[arg-type]
    assert chi_square(_draw({"temperature": 1.0, **params}, 8_000), law) < CHI2_BOUND


def test_a_sampler_with_another_temperature_is_caught() -> None:
    assert chi_square(_draw({"temperature": 1.25}, 8_000), _law()) > 2 * CHI2_BOUND


def test_noise_at_two_positions_of_one_request_is_independent() -> None:
    first, second = _draw({"temperature": 1.0}, 20_000), _draw({"temperature": 1.0}, 20_000, position=1)
    law = _law()
    pairs = [a * 8 + b for a, b in zip(first, second, strict=True)]
    statistic = chi_square(pairs, [p * q for p in law for q in law])
    assert statistic < 150  # 63 degrees of freedom: exceeded with probability 5e-9
    assert chi_square([a * 8 + a for a in first], [p * q for p in law for q in law]) > 1000  # a noise that repeats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9.9e-6])
def test_tiny_temperatures_are_greedy_and_ties_go_to_the_lowest_id(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]], dtype=dtype)
    choice = Choice(Request("r", [1], SamplingParams(temperature=temperature), noise_seed=1), 0)
    assert choose(logits, [choice]) == ([1], [True])


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_finite_and_nearly_greedy(temperature: float) -> None:
    draws = _draw({"temperature": temperature, "top_p": 0.9}, 200, LOGITS.float())
    assert draws == [0] * 200
    assert _draw({"temperature": temperature}, 200, LOGITS.float()) == [0] * 200


def test_a_row_is_chosen_as_if_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500)
    kinds = [{}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 0}, {"top_k": 40, "top_p": 0.9}, {"temperature": 1.7}]
    choices = [Choice(Request(str(i), [1], SamplingParams(**k), noise_seed=i), 3) for i, k in enumerate(kinds)]  # type: ignore[arg-type]
    together, _ = choose(logits, choices)
    assert together == [choose(logits[i : i + 1], [c])[0][0] for i, c in enumerate(choices)]
    assert together[1] == int(logits[1].argmax()) and together[3] == int(logits[3].argmax())


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    for temperature in (0.0, 1.0):
        own = SamplingParams(temperature=temperature)
        choices = [Choice(Request(str(i), [1], own, noise_seed=i), 0) for i in range(4)]
        assert choose(logits, choices)[1] == [True, False, False, True]


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert _draw({"top_k": 2**63 - 1}, 50) == _draw({}, 50) == _draw({"top_k": -1}, 50)


def test_filters_equal_a_full_sort() -> None:
    torch.manual_seed(1)
    scores = (torch.randn(40, 3000) * 2).round(decimals=1).double()  # many ties
    ks = [0, 1, 5, 300, 2999, 3000, 50, 0] * 5
    ps = [0.9, 1.0, 0.5, 0.99, 0.3, 1.0, 0.999999, 1e-9] * 5
    got = keep(scores, Limits.of(scores, [(k, p, 0.0, 1.0) for k, p in zip(ks, ps, strict=True)]))
    for row, (k, p) in enumerate(zip(ks, ps, strict=True)):
        order = torch.argsort(scores[row], descending=True, stable=True)[: k or 3000]
        mass = torch.softmax(scores[row][order], dim=0).cumsum(0)
        kept = order if p >= 1 else order[: int((mass < p).sum()) + 1]
        expected = torch.full_like(scores[row], float("-inf"))
        expected[kept] = scores[row][kept]
        assert torch.equal(got[row], expected), (k, p)
