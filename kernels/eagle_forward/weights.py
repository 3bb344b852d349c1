"""The tensors of an EAGLE-3 head, by name."""

from dataclasses import dataclass

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
