"""Calls into native/nucleus.cpp."""

import torch
from torch import Tensor

from specdec.kernels import native


def nucleus(scores: Tensor, temperatures: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As the twin."""
    scores = scores.contiguous()
    temperatures, top_p, min_p = (x.double().contiguous() for x in (temperatures, top_p, min_p))
    kept = torch.empty(scores.shape, dtype=torch.promote_types(scores.dtype, torch.float32))
    native.function("specdec_nucleus", "pppppiiii")(
        scores.data_ptr(),
        temperatures.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        kept.data_ptr(),
        *scores.shape,
        native.DTYPES[scores.dtype],
        torch.get_num_threads(),
    )
    return kept
