"""What min_p and top_p keep of a row of scores, found without sorting the vocabulary.

min_p comes first, and the nucleus is that of the law it leaves: its likeliest tokens whose mass reaches top_p, ties at
its end to the lower ids. The mass is a rounded sum, so engines may cut a token earlier or later where a sum
meets top_p to within 1e-6 (float32); within one engine a row's cut never depends on the rows beside it.
(Nucleus: Holtzman et al. 2020, section 3.1. min_p: Nguyen et al. 2024, arXiv 2407.01082.)
"""

import torch
from torch import Tensor

from specdec.kernels import native
from specdec.kernels.nucleus import kernel, reference

__all__ = ["nucleus"]


def nucleus(scores: Tensor, temperatures: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep each row's likeliest tokens: scores where kept, undivided, and -inf elsewhere.

    scores        [R, V]   float32, float64, bfloat16 or float16; rows that cannot choose (NaN, +inf, only -inf) stay
    temperatures  [R]      at which the mass is measured, 1e-5 or more
    top_p         [R]      in (0, 1]; 1 keeps all
    min_p         [R]      in [0, 1], of the largest probability; 0 keeps all
    returns       [R, V]   float32, or float64 where the scores are
    """
    assert scores.ndim == 2 and temperatures.shape == top_p.shape == min_p.shape == scores.shape[:1]
    is_native = scores.is_cpu and native.enabled()
    if is_native and scores.dtype == torch.float16:
        scores = scores.float()
    is_native = is_native and scores.dtype in native.DTYPES
    implementation = kernel.nucleus if is_native else reference.nucleus
    return implementation(scores, temperatures, top_p, min_p)
