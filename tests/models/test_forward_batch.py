"""Packing: a forward's tensors are what a token-by-token reading of its segments says."""

from __future__ import annotations

import random

import torch

from specdec.models.forward_batch import ForwardBatch, Segment


def test_every_tensor_is_what_the_segments_say() -> None:
    chance = random.Random(0)
    for block_size in (1, 4, 16):
        segments = []
        for _ in range(9):
            start, count = chance.randrange(40), chance.randint(1, 20)
            table = [chance.randrange(1000) for _ in range(-(-(start + count) // block_size))]
            ids = tuple(chance.randrange(300) for _ in range(count))
            segments.append(
                Segment(ids if chance.random() < 0.5 else list(ids), start, table, chance.randint(0, count))
            )
        batch = ForwardBatch.pack(segments, block_size, torch.device("cpu"))
        rows = [(s, start) for s, start in zip(segments, batch.cu_query_lens.tolist()[:-1], strict=True)]
        tokens = [(i, s, s.start + j) for i, s in enumerate(segments) for j in range(len(s.token_ids))]
        assert batch.token_ids.tolist() == [s.token_ids[p - s.start] for _, s, p in tokens]
        assert batch.positions.tolist() == [p for _, _, p in tokens]
        assert batch.slot_mapping.tolist() == [
            s.block_table[p // block_size] * block_size + p % block_size for _, s, p in tokens
        ]
        assert batch.seq_lens.tolist() == [s.start + len(s.token_ids) for s in segments]
        assert batch.cu_query_lens[-1] == len(tokens)
        for index, (s, _) in enumerate(rows):
            table = batch.block_tables[index].tolist()
            assert table == list(s.block_table) + [0] * (batch.block_tables.shape[1] - len(s.block_table))
        expected = [at + j for s, at in rows for j in range(len(s.token_ids) - s.num_logits, len(s.token_ids))]
        assert batch.logits_indices.tolist() == expected
        assert batch.token_ids.dtype == batch.slot_mapping.dtype == torch.int64
        assert batch.block_tables.dtype == batch.seq_lens.dtype == batch.cu_query_lens.dtype == torch.int32


def test_a_batch_without_scores_is_packed_too() -> None:
    batch = ForwardBatch.pack([Segment([5, 6], 0, [3], 0)], 16, torch.device("cpu"))
    assert batch.logits_indices.shape == (0,) and batch.slot_mapping.tolist() == [48, 49]
