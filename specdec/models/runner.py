"""ModelRunner: one model over one paged cache; a ForwardBatch goes in, logits come out.

Target and draft are two instances of this class. It knows the module, its cache and the step's
tensors; it holds no requests, samplers, proposers or schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.errors import InvalidRequestError
from specdec.kernels.llama_forward import LayerCaches, LlamaStep, PackedLlama, llama_forward
from specdec.kv_cache import FP8, KVCache, Scales
from specdec.models.attention import LayerCache, StepContext
from specdec.models.forward_batch import ForwardBatch, Segment
from specdec.models.graphs import Capture, Compute, GraphedForward, capture_for
from specdec.models.loaded import LoadedModel
from specdec.models.streams import ResidualStreams


class ModelRunner:
    """Runs forwards of one model.

    features      [T, F] of the last forward, in the batch's token order, where `capture` asked for them; else None
    scales        the cache holds fp8 under these; None: the model's own dtype
    is_compiled   torch.compile has been over the model's layers
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, scales: Scales | None = None) -> None:
        assert scales is None or model.fast is None, "the native forward does not read an fp8 cache"
        self.model = model
        self.features: Tensor | None = None
        self.is_compiled = False
        self._captured: tuple[int, ...] = ()
        dtype = model.dtype if scales is None else FP8
        self.cache = KVCache(
            model.attention.shapes, num_blocks, block_size, dtype=dtype, device=model.device, scales=scales
        )
        self._graph_capture = capture_for(model.device)
        self._compute = self._choose_forward()

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Keep, of every forward from now on, the residual streams that enter these layers.

        layer_ids   0-based, in the order they are joined: `features` is [T, len(layer_ids) * width]. The number of
                    layers stands for what leaves the last one, before the final norm
        """
        num_layers = len(self.model.attention.modules)
        wrong = [i for i in layer_ids if not 0 <= i <= num_layers]
        if wrong:
            raise InvalidRequestError(
                f"feature layer {wrong[0]} was asked for; the target has {num_layers} layers, so ids go from 0 to "
                f"{num_layers}",
                param="draft",
            )
        self._captured = tuple(layer_ids)
        self._compute = self._choose_forward()

    def _choose_forward(self) -> Compute:
        model, layer_ids = self.model, self._captured
        if model.fast is not None:
            return _native_forward(model.fast, self.cache, layer_ids)
        forward = _transformers_forward(model, self.cache, layer_ids)
        if self._graph_capture is not None:
            forward = self._recorded(forward, self._graph_capture).forward
        return torch.inference_mode()(forward)

    def _recorded(self, forward: Compute, capture: Capture) -> GraphedForward:
        size = self.cache.block_size
        max_blocks = min(-(-self.model.max_model_len // size), self.cache.num_blocks)
        return GraphedForward(forward, capture, block_size=size, max_blocks=max_blocks)

    def record_with(self, capture: Capture) -> GraphedForward:
        """Record steps and replay them from now on."""
        graphs = self._recorded(self._compute, capture)
        self._compute = torch.inference_mode()(graphs.forward)
        return graphs

    def pack(self, segments: Sequence[Segment]) -> ForwardBatch:
        """Lay rows out for this model's device."""
        return ForwardBatch.pack(segments, self.cache.block_size, self.model.device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a ragged batch, write its K and V, score the chosen places.

        returns  [L, V]; L may be 0 when only prompt chunks ran
        """
        logits, self.features = self._compute(batch)
        return logits


def _transformers_forward(model: LoadedModel, cache: KVCache, layer_ids: tuple[int, ...]) -> Compute:
    """transformers' own forward, its attention answered by the paged cache."""
    context = StepContext()
    none: list[tuple[None, None]] = [(None, None)] * len(cache.keys)
    scales: Sequence[tuple[Tensor, Tensor] | tuple[None, None]] = cache.scales or none
    for module, keys, values, own in zip(model.attention.modules, cache.keys, cache.values, scales, strict=True):
        module.specdec_cache = LayerCache(context, keys, values, own)  # type: ignore[assignment]
    streams = ResidualStreams(model, layer_ids)

    def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        with context.running(batch):
            out = model.module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        logits: Tensor = out.logits[0]
        return logits, streams.take()

    return compute


def _native_forward(fast: PackedLlama, cache: KVCache, layer_ids: tuple[int, ...]) -> Compute:
    """The same model in one native call a step."""
    caches = LayerCaches(zip(cache.keys, cache.values, strict=True))

    def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        step = LlamaStep(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_query_lens=batch.cu_query_lens,
            logits_indices=batch.logits_indices,
            feature_layers=layer_ids,
        )
        logits, features = llama_forward(fast, step, caches)
        return logits, features.transpose(0, 1).flatten(1) if layer_ids else None

    return compute
