"""ModelRunner: one model over one paged cache; a ForwardBatch goes in, logits come out.

Target and draft are two instances of this class. It knows the module, its cache and the step's
tensors; it holds no requests, samplers, proposers or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.llama_forward import LlamaStep, PackedLlama, llama_forward
from specdec.kv_cache import KVCache
from specdec.models.attention import LayerCache, StepContext
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.graphs import Capture, GraphedForward, capture_for
from specdec.models.loaded import LoadedModel


class ModelRunner:
    """Runs forwards of one model.

    features   [T, F] of the last forward, where a proposer asked for them; else None
    capture    how steps are recorded; None on a CPU and where SPECDEC_GRAPHS=off
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.features: Tensor | None = None
        self.cache = KVCache(model.attention.shapes, num_blocks, block_size, dtype=model.dtype, device=model.device)
        self._compute: Callable[[ForwardBatch], Tensor] = (
            _transformers_forward(model, self.cache) if model.fast is None else _native_forward(model.fast, self.cache)
        )
        capture = capture_for(model.device)
        if capture is not None:
            self.record_with(capture)

    def record_with(self, capture: Capture) -> GraphedForward:
        """Record steps and replay them from now on."""
        size = self.cache.block_size
        max_blocks = min(-(-self.model.max_model_len // size), self.cache.num_blocks)
        graphs = GraphedForward(self._compute, capture, block_size=size, max_blocks=max_blocks)
        self._compute = graphs.forward
        return graphs

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Lay rows out for this model's device."""
        return ForwardBatch.pack(segments, self.cache.block_size, self.model.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a ragged batch, write its K and V, score the chosen places.

        returns  [L, V]; L may be 0 when only prompt chunks ran
        """
        return self._compute(batch)


def _transformers_forward(model: LoadedModel, cache: KVCache) -> Callable[[ForwardBatch], Tensor]:
    """transformers' own forward, its attention answered by the paged cache."""
    context = StepContext()
    for module, keys, values in zip(model.attention.modules, cache.keys, cache.values, strict=True):
        module.specdec_cache = LayerCache(context, keys, values)  # type: ignore[assignment]

    def compute(batch: ForwardBatch) -> Tensor:
        with context.running(batch):
            out = model.module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        logits: Tensor = out.logits[0]
        return logits

    return compute


def _native_forward(fast: PackedLlama, cache: KVCache) -> Callable[[ForwardBatch], Tensor]:
    """The same model in one native call a step."""
    caches = list(zip(cache.keys, cache.values, strict=True))

    def compute(batch: ForwardBatch) -> Tensor:
        step = LlamaStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_query_lens=batch.cu_query_lens,
            logits_indices=batch.logits_indices,
        )
        return llama_forward(fast, step, caches)[0]

    return compute
