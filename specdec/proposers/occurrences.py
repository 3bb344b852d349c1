"""Occurrences: where the last tokens of a text stood before, found by hash chains over several depths.

It knows one growing text of integers and nothing else: no requests, no owners, no models. It takes the
place of a suffix automaton: the same longest match, a constant number of steps a token, and about
sixteen bytes a token and depth where an automaton of Python objects takes a thousand.
(Chains of equal hashes: Deutsch 1996, RFC 1951, section 4; here one chain for every depth.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

END = -1
"""Separates texts; never equal to a token."""

MAX_MATCH = 64
"""Longest match that is told apart from longer ones, tokens."""

_SMALLEST_TABLE = 64


@dataclass(frozen=True, slots=True)
class Match:
    """The longest earlier occurrences of the end of a text.

    length   tokens that agree, at most MAX_MATCH
    places   positions just behind each, the latest first; [n]
    """

    length: int
    places: tuple[int, ...]


class _Chain:
    """For one depth: the latest position of every hashed context, and from each position the one before it.

    heads      hash -> latest position, 0 where there is none; a power of two of entries
    earlier    position -> the position before it with the same hash; 0 ends a chain
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.heads = array("i", bytes(4 * _SMALLEST_TABLE))
        self.earlier = array("i", [0])

    def bucket(self, context: Sequence[int]) -> int:
        return hash(tuple(context)) & (len(self.heads) - 1)

    def push(self, text: array[int], place: int) -> None:
        """Position `place` follows text[place - depth : place]."""
        if place < self.depth:
            self.earlier.append(0)
            return
        if place >= len(self.heads):
            self._grow(text, place)
        bucket = self.bucket(text[place - self.depth : place])
        self.earlier.append(self.heads[bucket])
        self.heads[bucket] = place

    def _grow(self, text: array[int], end: int) -> None:
        """Twice as many buckets; every position is hashed again, which adds one hashing a token in all."""
        self.heads = array("i", bytes(8 * len(self.heads)))
        for place in range(self.depth, end):
            bucket = self.bucket(text[place - self.depth : place])
            self.earlier[place] = self.heads[bucket]
            self.heads[bucket] = place


class Occurrences:
    """A text and the chains over it.

    depths         context lengths that are hashed, ascending; matches shorter than the first are not found
    max_attempts   chain entries looked at for a lookup; where more places match, the latest count
    """

    def __init__(self, depths: Sequence[int], max_attempts: int = 16) -> None:
        self.text = array("i")
        self.max_attempts = max_attempts
        self._chains = [_Chain(depth) for depth in depths]

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; contexts that end before the last token can be found from now on."""
        for token in tokens:
            place = len(self.text)
            if place:
                for chain in self._chains:
                    chain.push(self.text, place)
            self.text.append(token)

    def find(self, tail: array[int]) -> Match | None:
        """The longest match of the end of `tail`, which may be the end of this very text.

        Exact while a context of the deepest depth that occurs at all stands in at most `max_attempts`
        chain entries; among more of them the latest are compared.
        """
        deeper = MAX_MATCH + 1
        for chain in reversed(self._chains):
            if chain.depth <= len(tail):
                places = self._walk(chain, tail)
                if places:
                    return self._longest(places, tail, chain.depth, deeper)
                deeper = chain.depth
        return None

    def _walk(self, chain: _Chain, tail: array[int]) -> list[int]:
        context = tail[-chain.depth :]
        place, found = chain.heads[chain.bucket(context)], []
        for _ in range(self.max_attempts):
            if not place:
                break
            if self.text[place - chain.depth : place] == context:
                found.append(place)
            place = chain.earlier[place]
        return found

    def _longest(self, places: list[int], tail: array[int], known: int, below: int) -> Match:
        """The best of places that agree in `known` tokens; none of them agrees in `below`."""
        lengths = [self._agreement(place, tail, known, below) for place in places]
        longest = max(lengths)
        return Match(longest, tuple(p for p, n in zip(places, lengths, strict=True) if n == longest))

    def _agreement(self, place: int, tail: array[int], known: int, below: int) -> int:
        """How many tokens before `place` equal the end of `tail`: at least `known`, less than `below`."""
        text, size, most = self.text, len(tail), min(place, len(tail), below - 1)
        n, chunk = known, 1
        while n + chunk <= most and text[place - n - chunk : place - n] == tail[size - n - chunk : size - n]:
            n += chunk
            chunk *= 2
        while chunk := chunk // 2:  # what was compared in one go is halved until the first difference is found
            if n + chunk <= most and text[place - n - chunk : place - n] == tail[size - n - chunk : size - n]:
                n += chunk
        return n
