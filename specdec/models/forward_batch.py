"""What one forward of a model needs, as tensors: a ragged run of tokens and where their cache lies.

It knows integers and how to lay them out; it does not know which model runs or why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
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
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_indices: list[int] = []
        seq_lens: list[int] = []
        cu_query_lens = [0]
        for s in segments:
            end = s.start + len(s.token_ids)
            token_ids += s.token_ids
            positions += range(s.start, end)
            slots += _slots(s.block_table, s.start, end, block_size)
            seq_lens.append(end)
            cu_query_lens.append(len(token_ids))
            logits_indices += range(len(token_ids) - s.num_logits, len(token_ids))
        width = max(len(s.block_table) for s in segments)
        tables: list[int] = []
        for s in segments:
            tables += s.block_table
            tables += [0] * (width - len(s.block_table))
        wide = _put((token_ids, positions, slots, logits_indices), np.int64, device)
        narrow = _put((tables, seq_lens, cu_query_lens), np.int32, device)
        return cls(
            token_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            logits_indices=wide[3],
            block_tables=narrow[0].view(len(segments), width),
            seq_lens=narrow[1],
            cu_query_lens=narrow[2],
        )


def _slots(table: Sequence[int], start: int, end: int, block_size: int) -> Sequence[int]:
    """Where the keys of positions start .. end - 1 go."""
    index, offset = divmod(start, block_size)
    first = table[index] * block_size + offset
    if offset + end - start <= block_size:  # nearly always: a decoding row with its drafts
        return range(first, first + end - start)
    return [table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def _put(lists: Sequence[list[int]], dtype: type, device: torch.device) -> tuple[Tensor, ...]:
    """The lists as tensors that share one copy to the device."""
    sizes = [len(numbers) for numbers in lists]
    together: NDArray[np.generic] = np.fromiter(chain.from_iterable(lists), dtype, sum(sizes))
    return to_device(together, device).split_with_sizes(sizes)
