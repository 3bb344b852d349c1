"""Load: what a step computes besides drafts, and who may draft. Values only; they decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.batch import Row
from specdec.config import MAX_SPECULATIVE_TOKENS
from specdec.request import Request


def keeps_up(request: Request) -> int:
    """The lag of a draft that computes what the target computes, as it goes."""
    return 1


@dataclass(frozen=True, slots=True)
class Sources:
    """Who may draft.

    free     proposers that cost nothing to ask
    costly   the one that runs a model, if any
    deepest  drafts the costly one is asked for at most
    lag      request -> tokens the costly one must compute before it can draft, the last known one included
    looks    False where only what is known before the draw may decide (acceptance "rejection")
    """

    free: tuple[str, ...] = ()
    costly: str | None = None
    lag: Callable[[Request], int] = keeps_up
    looks: bool = True
    deepest: int = MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes besides drafts.

    decoding   rows with one token each; keys: cached tokens they read; prompts: prompt tokens beside them
    """

    decoding: int
    keys: int
    prompts: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Load:
        """Of the rows of a step."""
        decoding = keys = prompts = 0
        for row in rows:
            keys += row.start
            if row.chooses and row.num_base == 1:
                decoding += 1
            else:
                prompts += row.num_base
        return cls(decoding, keys, prompts)
