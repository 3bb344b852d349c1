"""Token counts: which tokens one request has seen, and how often it has emitted them.

They hold committed tokens only. What drafts would add is derived for one row and thrown away, so that
a rejected draft leaves no trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class TokenCounts:
    """Distinct tokens with the number of times each was emitted; tokens only seen count zero.

    >>> counts = TokenCounts(seen=[7, 7, 3])
    >>> counts.add(5); counts.add(3)
    >>> [a.tolist() for a in counts.with_drafts([5, 9])]
    [[7, 3, 5, 9], [0, 1, 2, 1]]
    >>> [a.tolist() for a in counts.with_drafts([])]
    [[7, 3, 5], [0, 1, 1]]
    """

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self._ids = array("q")
        self._counts = array("q")
        self._place: dict[int, int] = {}
        self._snapshot: tuple[Ints, Ints] | None = None
        for token_id in seen:
            self._place_of(token_id)

    def _place_of(self, token_id: int) -> int:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._counts.append(0)
        return place

    def add(self, token_id: int) -> None:
        """Count one emitted token."""
        self._counts[self._place_of(token_id)] += 1
        self._snapshot = None

    def with_drafts(self, drafts: Sequence[int]) -> tuple[Ints, Ints]:
        """Ids and counts, [N] each and not to be written to, as if these drafts had been emitted."""
        if self._snapshot is None:
            self._snapshot = np.array(self._ids, np.int64), np.array(self._counts, np.int64)
        ids, counts = self._snapshot
        if not drafts:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token_id in drafts:
            place = self._place.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        if new:
            ids = np.concatenate([ids, np.fromiter(new, np.int64, len(new))])
            counts = np.concatenate([counts, np.fromiter(new.values(), np.int64, len(new))])
        return ids, counts
