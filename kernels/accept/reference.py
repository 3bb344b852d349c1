"""The plain-PyTorch twin of `sample`, and the noise itself.

Philox4x32-10 is from Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Words of 32 bits
live in int64 tensors, masked after every step.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures below are zero
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


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


def bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the random word of every token id: seeds [L] and positions [L], int64 -> [L, V] int64 in [0, 2^32)."""
    seeds, positions = seeds[:, None], positions[:, None]
    counters = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    zero = torch.zeros_like(counters)
    words = philox(
        (counters, positions & _MASK, positions >> 32 & _MASK, zero),
        (seeds & _MASK, seeds >> 32 & _MASK),
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def noise(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return Gumbel noise -log(-log1p(-u)), u = (word + 0.5) / 2^32: seeds [L], positions [L] -> [L, V].

    Its largest values come from small u, where floats are dense; in float32 u is kept below 1.
    """
    return _gumbel(bits(seeds, positions, vocab_size), dtype)


def noise_of(seeds: Tensor, positions: Tensor, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the noise of single tokens: seeds, positions and token_ids [N], int64 -> [N]."""
    words = philox(
        (token_ids // 4, positions & _MASK, positions >> 32 & _MASK, torch.zeros_like(token_ids)),
        (seeds & _MASK, seeds >> 32 & _MASK),
    )
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (token_ids % 4)[:, None])[:, 0], dtype)


def _gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    u = (words.to(dtype) + 0.5) * 2.0**-32
    if dtype == torch.float32:
        u = u.clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


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
