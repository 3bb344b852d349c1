"""The attention bridge: transformers' models call it, the paged cache answers.

Each attention module holds its own keys and values and shares its runner's StepContext, so that
nothing travels in keyword arguments. It knows modules and tensors, no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.errors import UnsupportedModelError
from specdec.kernels.paged_attention import StepLists, paged_attention
from specdec.kernels.write_kv import write_kv
from specdec.kv_cache import LayerShape
from specdec.models.forward_batch import ForwardBatch

IMPLEMENTATION = "specdec"

# Keyword arguments of attention calls that the bridge honours or may ignore. Any other one that is
# not None changes the result in a way we do not compute, so the model is refused.
_HONOURED = {"dropout", "scaling", "sliding_window", "softcap", "s_aux"}
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "position_embeddings",
    "output_router_logits",
    "num_items_in_batch",
}


class StepContext:
    """Where the running step's metadata lies while the model's layers run; one per runner."""

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None
        self.lists = StepLists()

    @contextmanager
    def running(self, batch: ForwardBatch) -> Iterator[None]:
        """Fence one forward; forwards of one runner never nest."""
        assert self.batch is None, "a forward is already running"
        self.batch, self.lists = batch, StepLists()
        try:
            yield
        finally:
            self.batch = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class LayerCache:
    """The paged keys and values of one attention module, and the step that runs.

    keys     [num_blocks, block_size, G, D]
    values   [num_blocks, block_size, G, Dv]
    scales   [G] of the keys and of the values in an fp8 cache
    """

    context: StepContext
    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)

    def __post_init__(self) -> None:
        _layer_caches[self.keys.data_ptr()] = self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write this step's K and V, then attend.

        query [T, H, D]   key [T, G, D]   value [T, G, Dv]   returns [T, H, Dv]
        """
        batch = self.context.batch
        assert batch is not None, "the model ran outside a step"
        k_scales, v_scales = self.scales
        write_kv(key, value, batch.slot_mapping, self.keys, self.values, k_scales, v_scales)
        return paged_attention(
            query, self.keys, self.values, batch.block_tables, batch.seq_lens, batch.cu_query_lens, scale, window,
            softcap, sinks, k_scales=k_scales, v_scales=v_scales, lists=self.context.lists,
        )  # fmt: skip


_layer_caches: WeakValueDictionary[int, LayerCache] = WeakValueDictionary()  # by the address of their keys


@dataclass(slots=True)
class AttentionProbe:
    """Collects, during one forward, which modules call attention, what they store and what they ask for.

    settings   per layer, the arguments of the call that shape the result (scaling, window, soft cap, sinks)
    """

    modules: list[nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)

    def record(
        self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Note one call, or refuse the model."""
        unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HONOURED | _HARMLESS)
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {', '.join(unknown)} to attention; the paged attention "
                "does not compute that"
            )
        if mask is not None:
            raise UnsupportedModelError(f"{type(module).__name__} builds its own attention mask, which would be lost")
        if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise UnsupportedModelError(f"{type(module).__name__} is not causal; only decoder-only models are served")
        if any(module is known for known in self.modules):
            raise UnsupportedModelError(f"{type(module).__name__} calls attention twice in one forward")
        self.modules.append(module)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        self.settings.append({k: v for k, v in kwargs.items() if k in _HONOURED and v is not None})


# Opaque to the compiler, which sees of a step only what its graphs compute: no lengths, no tables, and no cache but the
# keys, by whose address the layer is found. It need not know that they are written: nothing compiled reads them.
torch.library.define(
    "specdec::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor keys, float scale, int? window, float? softcap, Tensor? sinks) "
    "-> Tensor",
)


@torch.library.impl("specdec::attention", "CPU")
def _attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, *how: Any) -> Tensor:
    return _layer_caches[keys.data_ptr()].attend(query, key, value, *how)


@torch.library.register_fake("specdec::attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls.

    query [1, H, T, D]   key [1, G, T, D]   value [1, G, T, Dv]   returns [1, T, H, Dv]
    """
    state = getattr(module, "specdec_cache", None)
    if isinstance(state, AttentionProbe):
        state.record(module, key, value, attention_mask, kwargs)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None
    assert isinstance(state, LayerCache), "the model ran outside its runner"
    scale = kwargs.get("scaling")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    how = (
        query.shape[-1] ** -0.5 if scale is None else float(scale), kwargs.get("sliding_window"),
        kwargs.get("softcap"), kwargs.get("s_aux"),
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return torch.ops.specdec.attention(q, k, v, state.keys, *how)[None], None
    return state.attend(q, k, v, *how)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


@torch.inference_mode()
def probe_attention(model: nn.Module) -> AttentionProbe:
    """Run one token through the model and see which modules attend, and how wide they store."""
    probe = AttentionProbe()
    for module in model.modules():
        module.specdec_cache = probe  # type: ignore[assignment]
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    try:
        model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=False)
    finally:
        for module in model.modules():
            module.__dict__.pop("specdec_cache", None)  # some families exchange modules when they first run
    return probe
