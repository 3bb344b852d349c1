"""EagleRunner: one feature draft's head over its part of the shared blocks.

Position t of a block holds the pair (token t, feature of t - 1), so its content depends on no token behind t and
cached blocks are complete for any continuation. The feature of a block's last position, which the next block's first
pair needs, is kept beside it. It knows tensors and blocks; it holds no requests and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import kv_cache
from specdec.kernels.eagle_forward import Drafted, Pairs, draft, fuse, keep
from specdec.kv_cache import KVCache
from specdec.models.eagle_head import EagleHead
from specdec.models.forward_batch import ForwardBatch, Segment


class EagleRunner:
    """Runs a head.

    last_features   [num_blocks, width]   the feature of each full block's last position
    """

    def __init__(self, head: EagleHead, num_blocks: int, block_size: int) -> None:
        self.head = head
        self.cache = KVCache([head.kv_shape], num_blocks, block_size, dtype=head.dtype, device=head.device)
        self.last_features = torch.zeros(num_blocks, head.width, dtype=_feature_dtype(head), device=head.device)

    @torch.inference_mode()
    def fuse(self, streams: Tensor) -> Tensor:
        """The target's residual streams [T, F] as features [T, width]."""
        return fuse(self.head.weights, streams)

    @torch.inference_mode()
    def keep(self, segments: Sequence[Segment], features: Tensor) -> None:
        """Write the pairs of the segments' tokens with the true features [T, width] of the positions before them."""
        size = self.cache.block_size
        columns = [
            (token_id, p, s.block_table[p // size] * size + p % size)
            for s in segments
            for p, token_id in enumerate(s.token_ids, start=s.start)
        ]
        token_ids, positions, slots = torch.tensor(columns, device=self.head.device).T.contiguous()
        keep(self.head.weights, Pairs(token_ids, positions, features), slots, self._layer)

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Lay segments of one token each out, to draft behind them."""
        return ForwardBatch.pack(segments, self.cache.block_size, self.head.device)

    @torch.inference_mode()
    def draft(
        self, batch: ForwardBatch, features: Tensor, num_active: list[int], *, wants_logits: bool = False
    ) -> Drafted:
        """Draft behind a batch's tokens; num_active[s] rows, the first ones, make draft s."""
        pairs = Pairs(batch.token_ids, batch.positions, features)
        return draft(self.head.weights, pairs, batch.block_tables, num_active, self._layer, wants_logits)

    @torch.inference_mode()
    def scores(self, batch: ForwardBatch, step: int, features: Tensor, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """One draft more for the first rows of a batch, without choosing it.

        token_ids   [N] the `step`-th token behind the batch's (0: its own), each row's latest
        returns     scores [N, Vd] and the features [N, width] that the next draft takes
        """
        num_rows = len(token_ids)
        tokens = torch.tensor(token_ids, device=self.head.device)
        pairs = Pairs(tokens, batch.positions[:num_rows] + step, features[:num_rows])
        made = draft(self.head.weights, pairs, batch.block_tables[:num_rows], [num_rows], self._layer, True)
        assert made.logits is not None
        return made.logits, made.features

    @property
    def _layer(self) -> tuple[Tensor, Tensor]:
        return self.cache.keys[0], self.cache.values[0]


def _feature_dtype(head: EagleHead) -> torch.dtype:
    return torch.promote_types(head.dtype, torch.float32)


def bytes_per_block(head: EagleHead, block_size: int) -> int:
    """Bytes of one block's pairs and of the feature kept beside it."""
    pairs = kv_cache.bytes_per_token([head.kv_shape], head.dtype) * block_size
    return pairs + head.width * _feature_dtype(head).itemsize
