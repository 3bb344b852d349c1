"""The arithmetic of acceptance, by hand and against simulation."""

from __future__ import annotations

import torch

from draft_models.acceptance import Tally, run_lengths, walk, walk_beside
from draft_models.loss import Law, StepView, TargetEnd
from draft_models.measure import noise_given_text
from draft_models.offers import leading


def test_a_walk_by_hand() -> None:
    """Runs 2, -, -, 0, 5 of which k = 3 allows three: 3 steps, 3 + 1 + (3 + 1) tokens."""
    tally = walk([2, 9, 9, 0, 5, 9, 9, 9], 3)
    assert tally == Tally(3, (2, 2, 1)) and tally.mean_length == 1 + 5 / 3
    assert tally.conditional() == [2 / 3, 1.0, 0.5]


def test_always_right_and_always_wrong_pin_both_ends() -> None:
    assert walk([5] * 12, 5).mean_length == 6.0 and walk([0] * 12, 5).mean_length == 1.0


def test_runs_stop_at_the_first_disagreement() -> None:
    assert run_lengths(torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()).tolist() == [2, 0, 4]


def test_the_draft_steps_in_where_lookup_is_silent() -> None:
    shared = walk_beside(draft=[1, 9, 0, 2], ngram=[-1, 3, 1, -1], k=2)
    assert shared.without == Tally(1, (1, 0)) and shared.hybrid == Tally(2, (2, 0))
    assert shared.alone == Tally(2, (1, 1)) and leading((4, 5, 6), [4, 5, 7]) == 2


def _view(law: torch.Tensor, tokens: torch.Tensor) -> StepView:
    known = torch.ones(len(tokens), dtype=torch.bool)
    size = law.shape[-1]
    end = TargetEnd(torch.empty(0), torch.ones(size), 0.0, torch.eye(size), torch.arange(size))
    target = Law(end, torch.empty(0, size))
    target.whole = law
    return StepView(law.log(), torch.eye(size), target, torch.arange(len(tokens)), tokens, known, known[None])


def test_the_noise_of_a_text_makes_its_law_choose_it() -> None:
    law = torch.rand(500, 30, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.multinomial(law, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    noise = noise_given_text(_view(law, tokens), torch.arange(30), seed=2)
    assert torch.equal((law.log() + noise).argmax(-1), tokens)


def test_acceptance_under_it_is_that_of_noise_drawn_first() -> None:
    """40,000 rows each way; five standard errors of a difference of shares: a false alarm in 10^6 runs."""
    generator, count = torch.Generator().manual_seed(3), 40_000
    p, q = (torch.randn(2, 20, generator=generator) * 1.5).softmax(-1)
    noise = -(-torch.rand(count, 20, generator=generator).log()).log()
    forward = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).float().mean()
    tokens = torch.multinomial(p, count, replacement=True, generator=generator)
    given = noise_given_text(_view(p.expand(count, -1), tokens), torch.arange(20), seed=4)
    backward = ((q.log() + given).argmax(-1) == tokens).float().mean()
    independent = ((q.log() + noise).argmax(-1) == tokens).float().mean()
    assert abs(forward - backward) < 5 * (0.5 / count) ** 0.5
    assert abs(forward - independent) > 0.1, "the negative control: noise that does not know the text"
