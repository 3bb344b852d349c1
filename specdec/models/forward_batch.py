"""What one forward of a model needs, as tensors: a ragged run of tokens and where their cache lies.

It knows integers and how to lay them out; it does not know which model runs or why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.staging import to_device


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's tokens in a forward.

    token_ids      tokens at positions start, start + 1, ...
    block_table    blocks that cover start + len(token_ids) positions
    num_logits     score this many of the last tokens
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one forward; T tokens of B rows, no padding.

    token_ids        [T]     int64
    positions        [T]     int64
    slot_mapping     [T]     int64    block * block_size + offset, where the token's K and V go
    block_tables     [B, P]  int32    unused places hold 0
    seq_lens         [B]     int32    context of a row, this step's tokens included
    cu_query_lens    [B+1]   int32
    logits_indices   [L]     int64    places in T that are scored
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    logits_indices: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @classmethod
    def pack(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> ForwardBatch:
        """Lay segments out one after the other."""
        lens = np.fromiter((len(s.token_ids) for s in segments), np.int64, len(segments))
        starts = np.fromiter((s.start for s in segments), np.int64, len(segments))
        num_logits = np.fromiter((s.num_logits for s in segments), np.int64, len(segments))
        ends = np.cumsum(lens)
        rows = np.repeat(np.arange(len(segments)), lens)
        positions = np.arange(ends[-1]) - np.repeat(ends - lens - starts, lens)
        tables = np.zeros((len(segments), max(len(s.block_table) for s in segments)), np.int32)
        for table, segment in zip(tables, segments, strict=True):
            table[: len(segment.block_table)] = segment.block_table
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        last = np.cumsum(num_logits)
        logits_indices = np.arange(last[-1]) - np.repeat(last - ends, num_logits)

        def put(array: np.ndarray, dtype: type) -> Tensor:
            return to_device(array, torch.int64 if dtype is np.int64 else torch.int32, device)

        return cls(
            token_ids=put(np.concatenate([np.asarray(s.token_ids, np.int64) for s in segments]), np.int64),
            positions=put(positions, np.int64),
            slot_mapping=put(slots, np.int64),
            block_tables=put(tables, np.int32),
            seq_lens=put(starts + lens, np.int32),
            cu_query_lens=put(np.concatenate([[0], ends]), np.int32),
            logits_indices=put(logits_indices, np.int64),
        )
