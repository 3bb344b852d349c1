"""Blocks: who holds which part of the cache, counted in integers.

The pool knows block ids, reference counts, hashes of committed tokens and how much of a block the
draft has filled. It does not know tensors, devices or models; `KVCache` gives the ids storage.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Registered:
    """What a cached block holds: its chain hash, its parent's, and the very tokens."""

    chain_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class BlockPool:
    """Free list, reference counts and the prefix cache of one set of block ids.

    draft_ready   [num_blocks]  leading slots of a block whose draft part is valid too
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, not {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.draft_ready = [0] * num_blocks
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody, oldest first
        self._num_holders = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._registered: dict[int, _Registered] = {}
        self._root = os.urandom(16)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds; cached ones count, they are evicted on demand."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ holding

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, never used ones first, then the least recently used of the cached."""
        if num_blocks > self.num_free_blocks:
            raise RuntimeError(f"{num_blocks} blocks asked for, {self.num_free_blocks} are free")
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._num_holders[block] = 1
            self.draft_ready[block] = 0
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        entry = self._registered.pop(block)
        del self._block_of[entry.chain_hash]
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, in table order; the deepest is evicted first."""
        for block in reversed(list(blocks)):
            self._num_holders[block] -= 1
            if self._num_holders[block] < 0:
                raise RuntimeError(f"block {block} was given back more often than taken")
            if self._num_holders[block] == 0:
                if block in self._registered:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def note_draft(self, table: Sequence[int], start: int, end: int) -> None:
        """A draft's part is valid up to position `end` after a step that began at `start`.

        Blocks behind `start` follow the draft exactly; those before it are committed, so they only gain.
        """
        size, ready = self.block_size, self.draft_ready
        for i in range(min(start, end) // size, len(table)):
            now = min(max(end - i * size, 0), size)
            ready[table[i]] = max(ready[table[i]], now) if (i + 1) * size <= start else now

    # ------------------------------------------------------------------ prefix cache

    def root_hash(self, salt: str | None) -> bytes:
        """Start of a hash chain; another process or another salt starts elsewhere."""
        return hashlib.blake2b((salt or "").encode(), key=self._root, digest_size=16).digest()

    def _chain(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()

    def match(self, token_ids: Sequence[int], root: bytes) -> tuple[list[int], list[bytes]]:
        """The longest cached run of full blocks that holds exactly these tokens.

        At least the last token is left out, so that the target has something to compute.
        Returns blocks and their hashes; nothing is held yet (see `hold`).
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        if not self.enable_prefix_caching:
            return blocks, hashes
        parent, size = root, self.block_size
        for i in range((len(token_ids) - 1) // size):
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            chain_hash = self._chain(parent, tokens)
            block = self._block_of.get(chain_hash)
            if block is None:
                break
            entry = self._registered[block]
            if entry.token_ids != tokens or entry.parent != parent:  # never trust a hash alone
                break
            blocks.append(block)
            hashes.append(chain_hash)
            parent = chain_hash
        return blocks, hashes

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks count as free until they are held."""
        return sum(block in self._evictable for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Share cached blocks."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._num_holders[block] += 1

    def register(self, table: Sequence[int], hashes: list[bytes], token_ids: Sequence[int], root: bytes) -> None:
        """Make the full blocks of committed tokens findable; extends `hashes` in place.

        token_ids   the committed tokens whose keys and values the blocks hold
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(len(hashes), len(token_ids) // size):
            parent = hashes[-1] if hashes else root
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            chain_hash = self._chain(parent, tokens)
            hashes.append(chain_hash)
            if chain_hash not in self._block_of and table[i] not in self._registered:
                self._block_of[chain_hash] = table[i]
                self._registered[table[i]] = _Registered(chain_hash, parent, tokens)

    def clear_cache(self) -> None:
        """Forget every cached block that nobody holds."""
        while self._evictable:
            self._free.append(self._evict())

    # ------------------------------------------------------------------ invariants

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise unless free + cached + held = total and reference counts equal the tables."""
        holders = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            if holders[block] != self._num_holders[block]:
                raise AssertionError(
                    f"block {block} is in {holders[block]} tables but counted {self._num_holders[block]} times"
                )
        unheld = sorted([*self._free, *self._evictable])
        if unheld != sorted(b for b in range(self.num_blocks) if holders[b] == 0):
            raise AssertionError("free and cached blocks are not exactly those no table holds")
        if any(self._block_of.get(e.chain_hash) != b for b, e in self._registered.items()):
            raise AssertionError("the prefix cache and its index disagree")
        if len(self._block_of) != len(self._registered) or not set(self._evictable) <= set(self._registered):
            raise AssertionError("the prefix cache lists a block it does not know")
        if any(not 0 <= ready <= self.block_size for ready in self.draft_ready):
            raise AssertionError("draft_ready lies outside a block")
