"""The tensors of an EAGLE-3 head, by name."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.llama_forward.weights import LayerWeights, LlamaShape


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """One Llama layer between the target's features and scores over a draft vocabulary.

    layer   its qkv is [(H + 2 G) D, 2 width], embedding first; its input_norm is the embedding's
    """

    shape: LlamaShape
    fc: Tensor  # [width, F]
    fc_bias: Tensor | None  # [width]
    feature_norm: Tensor | None  # [F], before fc
    num_feature_norms: int  # parts of F that are normed each on its own; 0: none
    embedding: Tensor  # [V, width], of the target's vocabulary
    hidden_norm: Tensor  # [width], of the feature
    layer: LayerWeights
    norm: Tensor  # [width]
    head: Tensor  # [Vd, width]
    target_ids: Tensor  # [Vd] int64, ascending: what a draft id means to the target
    cos: Tensor  # [positions, R]
    sin: Tensor  # [positions, R]
    is_residual_normed: bool  # attention is added to the normed feature
    is_feedback_normed: bool  # the next draft's feature has passed the final norm

    def to(self, device: torch.device, dtype: torch.dtype) -> "EagleWeights":
        """The same weights on a device; floating ones in `dtype`, rotary tables at least in float32."""
        wide = torch.promote_types(dtype, torch.float32)

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().to(device, dtype) if value.is_floating_point() else value.to(device)

        layer = LayerWeights(**{f.name: move(getattr(self.layer, f.name)) for f in fields(LayerWeights)})
        moved = {f.name: move(getattr(self, f.name)) for f in fields(EagleWeights) if f.name != "layer"}
        moved |= {"cos": self.cos.to(device, wide), "sin": self.sin.to(device, wide)}
        return EagleWeights(layer=layer, **moved)
