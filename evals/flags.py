"""Flags: how lists are written on the command lines of this room. It knows strings only."""

from __future__ import annotations


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
