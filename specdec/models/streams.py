"""Residual streams: what enters the decoder layers of a transformers model, kept while it runs.

The one convention for layer ids, everywhere in the engine: id e is the stream that enters 0-based layer e (before
its norm); e = number of layers is what leaves the last one, before the final norm. It knows modules and hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedModelError
from specdec.models.loaded import LoadedModel


def decoder_layers(model: LoadedModel) -> nn.ModuleList:
    """The list whose i-th member holds the i-th attention module."""
    attention = model.attention.modules
    for found in model.module.modules():
        if not isinstance(found, nn.ModuleList) or len(found) != len(attention):
            continue
        if all(any(own is m for m in layer.modules()) for layer, own in zip(found, attention, strict=True)):
            return found
    raise UnsupportedModelError(
        f"{type(model.module).__name__} has no plain list of decoder layers, so a draft over its features cannot run"
    )


class ResidualStreams:
    """Hooks on the layers of one model; without ids there are none."""

    def __init__(self, model: LoadedModel, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = layer_ids
        self._kept: dict[int, Tensor] = {}
        layers = decoder_layers(model) if layer_ids else nn.ModuleList()
        for layer_id in set(layer_ids):
            if layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(self._before(layer_id), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(self._after(layer_id))

    def take(self) -> Tensor | None:
        """[T, ids * width] of the forward that just ran, and forget it."""
        if not self.layer_ids:
            return None
        joined = torch.cat([self._kept[i] for i in self.layer_ids], dim=-1)
        self._kept.clear()
        return joined

    def _before(self, layer_id: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._kept[layer_id] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def _after(self, layer_id: int) -> Any:
        def hook(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            self._kept[layer_id] = (out[0] if isinstance(out, tuple) else out)[0]

        return hook
