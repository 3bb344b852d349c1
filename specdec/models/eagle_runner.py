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
        batch = self._pack(segments)
        keep(self.head.weights, Pairs(batch.token_ids, batch.positions, features), batch.slot_mapping, self._layer)

    @torch.inference_mode()
    def draft(
        self, segments: Sequence[Segment], features: Tensor, num_active: list[int], *, wants_logits: bool = False
    ) -> Drafted:
        """Draft behind segments of one token each; num_active[s] rows, the first ones, make draft s."""
        batch = self._pack(segments)
        pairs = Pairs(batch.token_ids, batch.positions, features)
        return draft(self.head.weights, pairs, batch.block_tables, num_active, self._layer, wants_logits)

    @property
    def _layer(self) -> tuple[Tensor, Tensor]:
        return self.cache.keys[0], self.cache.values[0]

    def _pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        return ForwardBatch.pack(segments, self.cache.block_size, self.head.device)


def _feature_dtype(head: EagleHead) -> torch.dtype:
    return torch.promote_types(head.dtype, torch.float32)


def bytes_per_block(head: EagleHead, block_size: int) -> int:
    """Bytes of one block's pairs and of the feature kept beside it."""
    pairs = kv_cache.bytes_per_token([head.kv_shape], head.dtype) * block_size
    return pairs + head.width * _feature_dtype(head).itemsize
