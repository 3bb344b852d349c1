"""Marked parts of a document, which commands write anew. It knows text, not what the parts mean."""

from __future__ import annotations

from pathlib import Path


def replaced(text: str, name: str, body: str) -> str:
    r"""The text with `body` between its two marks; ValueError where it has no such part.

    >>> replaced("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb", "x", "new")
    'a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb'
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the README needs one part between {begin} and {end}")
    return f"{text[: text.index(begin)]}{begin}\n{body}\n{text[text.index(end) :]}"


def rewrite(path: Path, name: str, body: str) -> None:
    """Do so in a file."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), name, body), encoding="utf-8")


def folded(summary: str, table: str) -> str:
    """A long table that a reader opens."""
    return f"<details><summary>{summary}</summary>\n\n```\n{table}\n```\n\n</details>"
