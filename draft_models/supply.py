"""Supply: which shard of examples is trained on next, and its features, computed here or read from a folder.

It knows the order of the data and what was seen; another process may fill the folder ahead of it
(`--features-only` of the training command). It does not know heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draft_models.corpus import Example
from draft_models.features import FeatureTap, Sample, Shards, compute


@dataclass(slots=True)
class Supply:
    """Examples in shards of `shard_size`, each visited up to `epochs` times.

    visits   how often each shard was trained on
    folder   where features are kept; None computes them anew each time
    """

    examples: Sequence[Example]
    tap: FeatureTap
    epochs: int
    folder: Path | None = None
    shard_size: int = 32
    visits: dict[int, int] = field(default_factory=dict)

    @property
    def num_shards(self) -> int:
        """Shards of the whole data."""
        return -(-len(self.examples) // self.shard_size)

    def next_shard(self) -> int | None:
        """The least visited shard; of equals one whose features are at hand, then the lowest.

        So nothing is repeated while there is text that was never seen, and another process may work ahead.
        """
        at_hand = self._at_hand()
        open_ones = [i for i in range(self.num_shards) if self.visits.get(i, 0) < self.epochs]
        return min(open_ones, key=lambda i: (self.visits.get(i, 0), i not in at_hand, i), default=None)

    def _at_hand(self) -> set[int]:
        if self.folder is None:
            return set()
        return {int(path.stem.split("-")[1]) for path in Shards(self.folder).names()}

    def fill(self) -> None:
        """Work ahead: the features of every shard that lacks them, from the last, so that a trainer meets them."""
        for shard in reversed(range(self.num_shards)):
            if shard not in self._at_hand():
                self.samples(shard)

    def samples(self, shard: int) -> list[Sample]:
        """The samples of a shard; computed ones are kept where there is a folder."""
        if self.folder is not None:
            store = Shards(self.folder)
            path = store.path(shard)
            if path.exists():
                return store.read(path)
        found = list(compute(self.tap, self.examples[shard * self.shard_size : (shard + 1) * self.shard_size]))
        if self.folder is not None:
            store.write(shard, found)
        return found

    def visited(self, shard: int) -> None:
        """Note that a shard was trained on."""
        self.visits[shard] = self.visits.get(shard, 0) + 1
