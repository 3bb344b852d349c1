"""The law of one token and of whole outputs, in plain Python over lists, written from the documentation alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Scores = Callable[[Sequence[int], Sequence[int]], list[float]]


def law(
    logits: list[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: dict[str, Any],
    stop_ids: Sequence[int] = (),
) -> list[float]:
    """Probabilities of the next token; `bad_words` are given as id sequences."""
    s, n = list(logits), len(logits)
    if params.get("allowed_token_ids") is not None:
        s = [x if i in params["allowed_token_ids"] else -math.inf for i, x in enumerate(s)]
    for word in params.get("bad_words", ()):
        if len(output) >= len(word) - 1 and list(output)[len(output) - len(word) + 1 :] == list(word[:-1]):
            s[word[-1]] = -math.inf
    if len(output) < params.get("min_tokens", 0):
        for i in stop_ids:
            s[i] = -math.inf
    for i, bias in params.get("logit_bias", {}).items():
        s[i] += bias
    r = params.get("repetition_penalty", 1.0)
    for i in {*prompt, *output}:
        s[i] = s[i] / r if s[i] > 0 else s[i] * r
    for i in range(n):
        s[i] -= params.get("frequency_penalty", 0.0) * list(output).count(i)
        s[i] -= params.get("presence_penalty", 0.0) * (i in output)
    if params.get("temperature", 1.0) < 1e-5:
        best = s.index(max(s))
        return [float(i == best) for i in range(n)]
    return _filtered([x / params.get("temperature", 1.0) for x in s], params)


def _filtered(s: list[float], params: dict[str, Any]) -> list[float]:
    n, top = len(s), max(s)
    weights = [math.exp(x - top) for x in s]
    weights = [w if w >= params.get("min_p", 0.0) else 0.0 for w in weights]
    order = sorted(range(n), key=lambda i: (-weights[i], i))
    kept = order[: params.get("top_k") or n]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / total
        if mass >= params.get("top_p", 1.0):
            break
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(n)]


def outputs(
    scores: Scores, prompt: Sequence[int], params: dict[str, Any], length: int, stop_ids: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """Every output of at most `length` tokens with its probability."""
    done: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in open_.items():
            for i, p in enumerate(law(scores(prompt, output), prompt, output, params, stop_ids)):
                if p:
                    (done if i in stop_ids else longer)[(*output, i)] = mass * p
        open_ = longer
    return done | open_


def chi_square(draws: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, cells under 5 expected draws taken together.

    Infinite where something impossible was drawn.
    """
    counts: dict[tuple[int, ...], int] = {}
    for draw in draws:
        counts[draw] = counts.get(draw, 0) + 1
    if set(counts) - set(expected):
        return math.inf, 1
    cells: list[tuple[int, float]] = []
    rest, rest_mass = 0, 0.0
    for output, p in expected.items():
        if len(draws) * p >= 5:
            cells.append((counts.get(output, 0), len(draws) * p))
        else:
            rest, rest_mass = rest + counts.get(output, 0), rest_mass + len(draws) * p
    if rest_mass > 0:
        cells.append((rest, rest_mass))
    return sum((c - e) ** 2 / e for c, e in cells), max(len(cells) - 1, 1)


def bound(freedom: int) -> float:
    """What chi-square exceeds by chance once in a million (Wilson, Hilferty 1931; z = 4.75)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.75 * math.sqrt(part)) ** 3
