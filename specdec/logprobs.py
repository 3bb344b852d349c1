"""What a caller learns of one token's probability: a plain value, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and the likeliest others at its place, natural logarithms.

    logprob   None where it is not finite
    rank      1 for the likeliest; tokens of equal probability share the better rank
    top       the N likeliest as (token id, logprob), best first, ties to the lower id; may hold the token itself,
              and fewer where fewer are possible
    """

    token_id: int
    logprob: float | None
    rank: int
    top: tuple[tuple[int, float], ...] = ()
