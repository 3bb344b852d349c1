"""ModelRunner: one model over one paged cache; a ForwardBatch goes in, logits come out.

Target and draft are two instances of this class. It knows the module, its cache and the step's
tensors; it holds no requests, samplers, proposers or schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kv_cache import KVCache
from specdec.models.attention import LayerCache, StepContext
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.loaded import LoadedModel


class ModelRunner:
    """Runs forwards of one model."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.context = StepContext()
        self.cache = KVCache(model.attention.shapes, num_blocks, block_size, dtype=model.dtype, device=model.device)
        layers = zip(model.attention.modules, self.cache.keys, self.cache.values, strict=True)
        for module, keys, values in layers:
            module.specdec_cache = LayerCache(self.context, keys, values)  # type: ignore[assignment]

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Lay rows out for this model's device."""
        return ForwardBatch.pack(segments, self.cache.block_size, self.model.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a ragged batch, write its K and V, score the chosen places.

        returns  [L, V]; L may be 0 when only prompt chunks ran
        """
        with self.context.running(batch):
            out = self.model.module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        logits: Tensor = out.logits[0]
        return logits
