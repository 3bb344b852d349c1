"""Past outputs: a bounded store of what was answered before, one part for each owner.

It knows keys (who asked, with which salt) and texts of integers. The parts share nothing but the bound on
their sum, so nothing of one can be found through another. It knows no requests and makes no offers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specdec.proposers.occurrences import END, Occurrences

DEPTHS = (2, 4, 8, 16)
"""Context lengths that can be looked up. A single token says too little about somebody else's text."""

OVERHEAD = 128
"""What an owner's part costs before it holds anything, in tokens."""


class PastOutputs:
    """Two generations of texts: when the young one is full the old one is dropped and they change places.

    capacity   most tokens in both together; the latest capacity / 2 are always there

    A text longer than a generation keeps its end.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[Hashable, Occurrences] = {}
        self._old: dict[Hashable, Occurrences] = {}
        self._num_young = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that can be found."""
        return sum(len(part) for generation in (self._young, self._old) for part in generation.values())

    def add(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Remember a text for the owner of `key`."""
        most = self.capacity // 2 - OVERHEAD - 1
        if most < 1 or not tokens:
            return
        tokens = tokens[-most:]
        cost = len(tokens) + 1 + (OVERHEAD if key not in self._young else 0)
        if self._num_young + cost > self.capacity // 2:
            self._young, self._old = {}, self._young
            self._num_young, cost = 0, len(tokens) + 1 + OVERHEAD
        part = self._young.setdefault(key, Occurrences(DEPTHS))
        part.extend([*tokens, END])
        self._num_young += cost

    def parts(self, key: Hashable) -> list[Occurrences]:
        """What the owner of `key` can look up, the younger first."""
        return [generation[key] for generation in (self._young, self._old) if key in generation]
