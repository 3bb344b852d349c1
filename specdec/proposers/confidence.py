"""Confidence: how often what followed an earlier match follows again, from its length and its counts.

It knows one formula and no text. A draft behind a match of n tokens that `agreeing` of `places` places
share is right with about

    agreeing / places * (1 - 0.66 / (n ** 0.85 * agreeing ** 0.7))

The shape is that of an escape estimate (prediction by partial matching: Cleary, Witten 1984); the three
constants were fitted to greedy answers of SmolLM2-135M-Instruct. `python -m evals.lookup` prints how the
estimate compares with what was accepted; they rank offers, and a controller learns the rest.
"""

from __future__ import annotations

_MISS_OF_ONE = 0.66
_LENGTH_POWER = 0.85
_COUNT_POWER = 0.7


def confidence(length: int, agreeing: int = 1, places: int = 1) -> float:
    """Estimate, in (0, 1), that the next token is the one that followed `agreeing` of `places` matches.

    length   tokens that match, at least 1

    >>> [round(confidence(n), 2) for n in (1, 2, 4, 16)]
    [0.34, 0.63, 0.8, 0.94]
    >>> round(confidence(1, 2, 4), 2)
    0.3
    """
    miss: float = _MISS_OF_ONE / (length**_LENGTH_POWER * agreeing**_COUNT_POWER)
    return agreeing / places * (1 - miss)
