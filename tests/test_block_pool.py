"""Blocks: nothing is lost, shared by mistake, or trusted by its hash alone."""

from __future__ import annotations

import pytest

from specdec.block_pool import BlockPool


def _register(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[int]:
    """Take blocks for these tokens, register them and give them back: what a finished request leaves."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    pool.register(table, [], tokens, pool.root_hash(salt))
    pool.release(table)
    return table


def test_blocks_go_round() -> None:
    pool = BlockPool(4, 8)
    table = pool.allocate(3)
    assert pool.num_free_blocks == 1 and pool.usage == 0.75
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    pool.check_integrity([table])
    pool.release(table)
    assert pool.num_free_blocks == 4
    pool.check_integrity([])


def test_a_block_given_back_twice_is_an_error() -> None:
    pool = BlockPool(2, 8)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(RuntimeError, match="more often than taken"):
        pool.release(table)


def test_a_prefix_is_found_but_its_last_token_is_left_to_compute() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(12))
    table = _register(pool, tokens)
    assert pool.match(tokens, pool.root_hash(None))[0] == table[:2]  # 12 tokens fill 3 blocks; one stays out
    assert pool.match([*tokens, 99], pool.root_hash(None))[0] == table
    assert pool.match([*tokens[:5], 99, 98, 97, 96], pool.root_hash(None))[0] == table[:1]


def test_one_differing_token_is_never_a_hit() -> None:
    pool = BlockPool(64, 16)
    _register(pool, [65] * 16)
    root = pool.root_hash(None)
    assert pool.match([65 + 256] * 16 + [1], root)[0] == []  # same low byte
    for place in range(16):
        other = [65] * 16 + [1]
        other[place] += 1
        assert pool.match(other, root)[0] == []


def test_a_forged_hash_is_not_trusted() -> None:
    pool = BlockPool(4, 4)
    table = _register(pool, [1, 2, 3, 4])
    root = pool.root_hash(None)
    forged = pool._chain(root, (9, 9, 9, 9))
    pool._block_of[forged] = table[0]  # two token runs, one hash
    assert pool.match([9, 9, 9, 9, 5], root)[0] == []


def test_salts_and_processes_never_share() -> None:
    pool, other = BlockPool(8, 4), BlockPool(8, 4)
    _register(pool, [1, 2, 3, 4], salt="a")
    assert pool.match([1, 2, 3, 4, 5], pool.root_hash("a"))[0]
    assert not pool.match([1, 2, 3, 4, 5], pool.root_hash("b"))[0]
    assert not pool.match([1, 2, 3, 4, 5], pool.root_hash(None))[0]
    assert pool.root_hash(None) != other.root_hash(None)


def test_the_least_recently_used_is_evicted_and_the_deepest_first() -> None:
    pool = BlockPool(4, 4)
    old = _register(pool, list(range(8)))
    new = _register(pool, list(range(100, 108)))
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match([*range(100, 108), 0], pool.root_hash(None))[0] == new


def test_a_held_block_is_not_evicted() -> None:
    pool = BlockPool(2, 4)
    table = _register(pool, list(range(4)))
    pool.hold(table)
    assert pool.num_free_blocks == 1 and pool.allocate(1) != table
    pool.release(table)
    pool.check_integrity([[1 - table[0]]])


def test_a_recycled_block_forgets_what_the_draft_had() -> None:
    pool = BlockPool(1, 4)
    table = pool.allocate(1)
    pool.draft_ready[table[0]] = 4
    pool.release(table)
    assert pool.draft_ready[pool.allocate(1)[0]] == 0


def test_integrity_catches_a_leak() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="in 0 tables but counted 1"):
        pool.check_integrity([])
