"""Asking: for which rows, and how deep, a draft model's passes pay once the free offers of a step are known.

It knows chances, seconds and a rate; it knows no requests, proposers or history. Everything is weighed in tokens: a
second of the step is worth `rate` tokens, what the step would emit per second without the model. A set of passes that
brings more tokens than its seconds are worth raises the step's rate, and none does otherwise (the test of Dinkelbach's
method for ratios, 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Asking:
    """Whom to ask.

    rows    indices of the candidates, those that gain most first; none: the model is left alone
    depth   drafts of each
    gain    tokens more than without the model, its seconds paid
    """

    rows: tuple[int, ...]
    depth: int
    gain: float


NOBODY = Asking((), 0, 0.0)


def net_value(chances: np.ndarray, extra: Sequence[float], rate: float) -> np.ndarray:
    """Tokens that offers of up to 1..K drafts bring, [R, K]: the best part of each verified, its seconds paid.

    chances   [R, S, K]   conditional chances of each row's drafts, in S cases that are as likely as each other
    extra     [K+1]       seconds that verifying 0..K drafts of one row adds to the step
    rate      tokens a second of the step is worth
    """
    gained = np.cumsum(np.cumprod(chances, axis=2), axis=2) - rate * np.array(extra[1 : chances.shape[2] + 1])
    np.maximum.accumulate(gained, axis=2, out=gained)
    best: np.ndarray = np.add.reduce(np.maximum(gained, 0.0, out=gained), axis=1) / chances.shape[1]
    return best


def net_gain(chances: Sequence[float], extra: Sequence[float], rate: float) -> float:
    """The same of one offer that is there: chances [K] of its drafts."""
    best = gained = 0.0
    reached = 1.0
    for chance, seconds in zip(chances, extra[1 : len(chances) + 1], strict=True):
        reached *= chance
        gained += reached
        best = max(best, gained - rate * seconds)
    return best


FEW = 96
"""Rows times depths up to which Python's floats are quicker than arrays."""


def best_asking(value: np.ndarray, drafting: Sequence[float], rate: float, opening: float = 0.0) -> Asking:
    """The rows and the depth that gain most; of equals the fewest rows, and of those the least depth.

    value      [R, K]   tokens that drafts of up to 1..K bring a row, over what it has without the model
    drafting   [R+1]    seconds of one pass over 0..R rows
    opening    seconds of what the model must catch up with
    """
    return (ask_few if value.size <= FEW else ask_many)(value, drafting, rate, opening)


def ask_few(value: np.ndarray, drafting: Sequence[float], rate: float, opening: float) -> Asking:
    """`best_asking`, one row after the other."""
    best = (-math.inf, 0, 0)
    orders: list[list[int]] = []
    for place, own in enumerate(value.T.tolist()):
        order = sorted(range(len(own)), key=own.__getitem__, reverse=True)  # stable, in reverse too
        orders.append(order)
        gained = 0.0
        for count, row in enumerate(order, start=1):
            gained += own[row]
            net = gained - rate * (drafting[count] * (place + 1) + opening)
            if net > best[0] or (net == best[0] and count < best[1]):
                best = (net, count, place)
    net, count, place = best
    return Asking(tuple(orders[place][:count]), place + 1, net)


def ask_many(value: np.ndarray, drafting: Sequence[float], rate: float, opening: float) -> Asking:
    """`best_asking`, in a few array operations."""
    order = np.argsort(-value, axis=0, kind="stable")
    gained = np.cumsum(np.take_along_axis(value, order, axis=0), axis=0)
    depths = np.arange(1, value.shape[1] + 1)
    net = gained - rate * (np.array(drafting[1 : len(value) + 1])[:, None] * depths + opening)
    row, place = np.unravel_index(int(net.argmax()), net.shape)
    return Asking(tuple(order[: row + 1, place].tolist()), int(depths[place]), float(net[row, place]))
