"""Tables: rows of text, aligned for a terminal. It knows strings only."""

from __future__ import annotations

from collections.abc import Sequence


def render(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; numbers to the right, words to the left.

    >>> print(render(["name", "tok/s"], [["plain", "9.5"], ["ngram", "12"]]))
    name   tok/s
    plain    9.5
    ngram     12
    """
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]
    to_right = [all(_is_number(row[i]) for row in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, to_right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in [headers, *rows])


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-")


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, three digits; "-" for None.

    >>> milliseconds(0.01234)
    '12.3'
    """
    return "-" if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
