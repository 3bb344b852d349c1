"""The nucleus: what a full sort says, up to rounding of the mass, in both implementations."""

import pytest
import torch
from kernel_oracles import needs_native
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.nucleus import nucleus

SIZES = [1, 2, 15, 64, 1023, 1025, 5000]
TOP_P = [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7, 1 - 1e-16, 1.0]


def _rows(vocab_size: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    x = 3 * torch.randn(len(TOP_P), vocab_size, generator=generator)
    if kind == "ties":
        return x.round()
    if kind == "equal":
        return torch.zeros_like(x)
    if kind == "masked":
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.7, -float("inf"))
    return x / 30 if kind == "flat" else x


def _check(kept: Tensor, scores: Tensor, temperature: float, top_p: float, slack: float) -> None:
    """A prefix of the order by score, then id, that reaches top_p and would not without its last."""
    x = scores.double()
    mass = torch.softmax(x / temperature, dim=0)
    order = torch.argsort(x, descending=True, stable=True)
    inside = torch.isfinite(kept)
    size = int(inside.sum())
    assert inside[order[:size]].all() and torch.equal(kept[inside], scores.to(kept.dtype)[inside])
    if top_p == 1:
        assert size == int(torch.isfinite(x).sum())
        return
    assert float(mass[inside].sum()) >= top_p - slack
    assert float(mass[order[: size - 1]].sum()) <= top_p + slack


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "equal", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_shortest_prefix_of_the_sorted_row(dtype: torch.dtype, kind: str, is_native: bool) -> None:
    slack = 1e-11 if dtype == torch.float64 else 2e-6
    for vocab_size in SIZES:
        scores = _rows(vocab_size, kind).to(dtype)
        scores = scores[torch.isfinite(scores).any(1)]
        top_p = torch.tensor(TOP_P[: len(scores)], dtype=torch.float64)
        for temperature in (1e-5, 0.7, 3.0):
            limits = torch.full_like(top_p, temperature), top_p, torch.zeros_like(top_p)
            with torch.no_grad() if is_native else native.disabled():
                kept = nucleus(scores, *limits)
            for row, p in enumerate(top_p.tolist()):
                _check(kept[row], scores[row], temperature, p, slack)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_min_p_comes_first_and_both_implementations_agree(dtype: torch.dtype) -> None:
    scores = _rows(5000, "ties").to(dtype)
    min_p = torch.tensor([0.0, 1e-6, 0.02, 0.1, 0.5, 1.0, 1e-3, 0.3], dtype=torch.float64)
    top_p = torch.tensor([0.6, 0.7, 0.8, 0.95, 0.3, 0.5, 1.0, 1.0], dtype=torch.float64)
    temperatures = torch.full_like(top_p, 1.3)
    kept = nucleus(scores, temperatures, top_p, min_p)
    with native.disabled():
        assert torch.equal(kept, nucleus(scores, temperatures, top_p, min_p))
    floor = scores.double().amax(1) + 1.3 * torch.log(min_p)
    for row in range(len(scores)):
        survivors = scores[row].masked_fill(scores[row].double() < floor[row] - 1e-9, -float("inf"))
        _check(kept[row], survivors, 1.3, float(top_p[row]), 2e-6)


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_rows_that_cannot_choose_stay_as_they_are(is_native: bool) -> None:
    scores = torch.zeros(4, 100)
    scores[0, 7], scores[1, 99], scores[2] = float("nan"), float("inf"), -float("inf")
    half = torch.full((4,), 0.5, dtype=torch.float64)
    with torch.no_grad() if is_native else native.disabled():
        kept = nucleus(scores, half, half, torch.zeros_like(half))
    assert torch.equal(kept[:3].nan_to_num(9), scores[:3].nan_to_num(9))
    assert torch.isfinite(kept[3]).nonzero()[:, 0].tolist() == list(range(50))


def test_a_row_does_not_notice_the_others() -> None:
    scores = 2 * torch.randn(9, 3000, generator=torch.Generator().manual_seed(0))
    top_p = torch.linspace(0.1, 0.99, 9, dtype=torch.float64)
    limits = torch.ones_like(top_p), top_p, torch.zeros_like(top_p)
    together = nucleus(scores, *limits)
    assert torch.equal(nucleus(scores, *torch.stack(limits, dim=1).unbind(1)), together)  # of any strides
    for row in range(9):
        assert torch.equal(nucleus(scores[row : row + 1], *(x[row : row + 1] for x in limits))[0], together[row])
