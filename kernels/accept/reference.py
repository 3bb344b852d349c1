"""The plain-PyTorch twins of `sample`, `accept` and `reject`, and the noise itself.

Philox4x32-10 is from Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Words of 32 bits
live in int64 tensors, masked after every step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures below are zero
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

# The last word of a counter: draws that must not know of each other count apart.
CHOICE_STREAM, COIN_STREAM = 0, 1
DRAFT_POSITIONS = 2**48
"""Added to the positions of drafts that are drawn for `reject`; an output is never that long."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Judgement(NamedTuple):
    """What `accept` says.

    token_ids      [L]   what the target itself chooses at every logits row
    num_accepted   [B]   length of the prefix of drafts that equals it
    next_ids       [B]   the target's token behind that prefix
    is_finite      [B]   False where a row up to there could not choose
    """

    token_ids: Tensor
    num_accepted: Tensor
    next_ids: Tensor
    is_finite: Tensor


class Rejection(NamedTuple):
    """What `reject` says.

    num_accepted   [B]   drafts kept
    next_ids       [B]   the token behind them: of the residual, or of p where every draft was kept
    is_finite      [B]   False where a row up to there held NaN or +inf or only -inf
    """

    num_accepted: Tensor
    next_ids: Tensor
    is_finite: Tensor


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four words for each counter of four words and key of two; any shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two words wraps in int64, but its 64 bits are right, and so are both halves once masked.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32 & _MASK) ^ c1 ^ k0
        c2 = (product0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def bits(seeds: Tensor, positions: Tensor, vocab_size: int, stream: int = CHOICE_STREAM) -> Tensor:
    """Return the random word of every token id: seeds [L] and positions [L], int64 -> [L, V] int64 in [0, 2^32)."""
    seeds, positions = seeds[:, None], positions[:, None]
    counters = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    words = philox(
        (counters, positions & _MASK, positions >> 32 & _MASK, torch.full_like(counters, stream)),
        (seeds & _MASK, seeds >> 32 & _MASK),
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def noise(
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    stream: int = CHOICE_STREAM,
) -> Tensor:
    """Return Gumbel noise -log(-log1p(-u)), u = (word + 0.5) / 2^32: seeds [L], positions [L] -> [L, V].

    Its largest values come from small u, where floats are dense; in float32 u is kept below 1.
    """
    return _gumbel(bits(seeds, positions, vocab_size, stream), dtype)


def noise_of(seeds: Tensor, positions: Tensor, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the noise of single tokens: seeds, positions and token_ids [N], int64 -> [N]."""
    words = philox(
        (token_ids // 4, positions & _MASK, positions >> 32 & _MASK, torch.zeros_like(token_ids)),
        (seeds & _MASK, seeds >> 32 & _MASK),
    )
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (token_ids % 4)[:, None])[:, 0], dtype)


def uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (word + 0.5) / 2^32, inside (0, 1) in every dtype."""
    u = (words.to(dtype) + 0.5) * 2.0**-32
    return u.clamp_max(1 - 2.0**-24) if dtype == torch.float32 else u


def _gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    return -torch.log(-torch.log1p(-uniform(words, dtype)))


def perturbed(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """Return the scores whose argmax is the chosen token: logits [L, V] -> [L, V], float32 or float64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits, temperatures = logits.to(wide), temperatures.to(wide)[:, None]
    is_greedy = temperatures < GREEDY_BELOW
    noisy = logits / temperatures.masked_fill(is_greedy, 1) + noise(seeds, positions, logits.shape[1], wide)
    return torch.where(is_greedy, logits, noisy)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """As the door."""
    scores = perturbed(logits, seeds, positions, temperatures)
    top = scores.amax(dim=-1, keepdim=True)
    token_ids = (scores == top).int().argmax(dim=-1)  # the lowest of equals
    is_finite = torch.isfinite(top[:, 0]) & (logits < float("inf")).all(dim=-1)
    return token_ids * is_finite, is_finite


def accept(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, drafts: Tensor, bounds: Tensor
) -> Judgement:
    """As the door."""
    token_ids, is_row_finite = sample(logits, seeds, positions, temperatures)
    at = _Places.of(bounds, len(logits))
    num_accepted = at.lowest(at.is_last | (token_ids != drafts))  # behind a request's last row nothing was drafted
    first_bad = at.lowest(~is_row_finite)
    is_finite = (first_bad > num_accepted) | (at.sizes == 0)
    next_ids = at.take(token_ids, num_accepted).masked_fill(at.sizes == 0, 0)
    return Judgement(token_ids, num_accepted.to(bounds.dtype), next_ids, is_finite)


def reject(
    scores: Tensor, draft_probs: Tensor | None, seeds: Tensor, positions: Tensor, drafts: Tensor, bounds: Tensor
) -> Rejection:
    """As the door."""
    at = _Places.of(bounds, len(scores))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    log_p = scores.log_softmax(1)
    drafts = drafts.masked_fill(at.is_last, 0)  # not read
    p = log_p.gather(1, drafts[:, None])[:, 0].exp()
    q = torch.ones_like(p) if draft_probs is None else draft_probs.to(p.dtype).gather(1, drafts[:, None])[:, 0]
    coins = uniform(bits(seeds, positions, 1, COIN_STREAM)[:, 0], p.dtype)
    can_choose = (scores < float("inf")).all(1) & (scores > -float("inf")).any(1)
    num_accepted = at.lowest(at.is_last | ~can_choose | ~(coins * q < p))  # u < p / q, without dividing by zero
    log_p = at.take(log_p, num_accepted)
    if draft_probs is None:
        q = torch.nn.functional.one_hot(at.take(drafts, num_accepted), scores.shape[1])
        q = q.masked_fill(at.take(at.is_last, num_accepted)[:, None], 0)
    else:
        q = at.take(draft_probs, num_accepted)
    rest = _residual(log_p, q.to(log_p.dtype))
    g = noise(at.take(seeds, num_accepted), at.take(positions, num_accepted), scores.shape[1], p.dtype)
    noisy = rest + g
    next_ids = (noisy == noisy.amax(1, keepdim=True)).int().argmax(1)  # the lowest of equals
    is_finite = at.take(can_choose, num_accepted) | (at.sizes == 0)
    next_ids = next_ids.masked_fill(~is_finite | (at.sizes == 0), 0)
    return Rejection(num_accepted.to(bounds.dtype), next_ids, is_finite)


def _residual(log_p: Tensor, q: Tensor) -> Tensor:
    """Logarithms of (p - q)+, [B, V]; of p where rounding left nothing of the difference."""
    rest = torch.where(q > 0, (log_p.exp() - q).clamp_min(0).log(), log_p)
    is_empty = ~(rest > -float("inf")).any(1)
    return torch.where(is_empty[:, None], log_p, rest)


class _Places(NamedTuple):
    """Where requests lie among logits rows.

    first     [B]   a request's first row
    sizes     [B]   how many it has
    request   [L]   whose a row is
    is_last   [L]   True for the last row of a request
    """

    first: Tensor
    sizes: Tensor
    request: Tensor
    is_last: Tensor

    @classmethod
    def of(cls, bounds: Tensor, num_rows: int) -> "_Places":
        first, sizes = bounds[:-1].long(), bounds.diff().long()
        request = torch.repeat_interleave(torch.arange(len(sizes), device=bounds.device), sizes, output_size=num_rows)
        rows = torch.arange(num_rows, device=bounds.device)
        return cls(first, sizes, request, rows == (first + sizes - 1)[request])

    def lowest(self, holds: Tensor) -> Tensor:
        """The first row of each request, counted within it, at which something holds; else its size: [L] -> [B]."""
        place = torch.arange(len(holds), device=holds.device) - self.first[self.request]
        return self.sizes.scatter_reduce(0, self.request, torch.where(holds, place, self.sizes[self.request]), "amin")

    def take(self, x: Tensor, place: Tensor) -> Tensor:
        """The entry at a place within each request; any where it has no rows: x [L, ...] -> [B, ...]."""
        if not len(x):
            return x.new_zeros(len(place), *x.shape[1:])
        return x[(self.first + place).clamp_max(len(x) - 1)]
