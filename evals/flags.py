"""Flags: how lists are written on the command lines of this room. It knows strings only."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def words(text: str) -> list[str]:
    """Parts between commas.

    >>> words("chat, code,")
    ['chat', 'code']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Integers between commas.

    >>> numbers("1,8")
    [1, 8]
    """
    return [int(word) for word in words(text)]


def whole(least: int) -> Callable[[str], int]:
    """An integer that is at least `least`, as the type of a flag.

    >>> whole(1)("8")
    8
    """

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"it is {value}; it must be at least {least}")
        return value

    return integer


def above(limit: float) -> Callable[[str], float]:
    """A finite number above `limit`, as the type of a flag.

    >>> above(0)("0.5")
    0.5
    """

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value <= limit:
            raise argparse.ArgumentTypeError(f"it is {value:g}; it must be finite and above {limit:g}")
        return value

    return number
