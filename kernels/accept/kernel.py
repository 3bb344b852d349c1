"""Calls into native/accept.cpp."""

import torch
from torch import Tensor

from specdec.kernels import native


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """As the twin."""
    num_rows, vocab_size = logits.shape
    logits, seeds, positions = logits.contiguous(), seeds.contiguous(), positions.contiguous()
    wide = torch.promote_types(logits.dtype, torch.float32)
    if temperatures.dtype != wide:  # 1e-5 as the twin sees it
        temperatures = temperatures.to(wide)
    temperatures = temperatures.double().contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    native.function("specdec_sample", "ppppppiiii")(
        logits.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        temperatures.data_ptr(),
        token_ids.data_ptr(),
        is_finite.data_ptr(),
        num_rows,
        vocab_size,
        native.DTYPES[logits.dtype],
        torch.get_num_threads(),
    )
    return token_ids, is_finite


def bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """As the twin: the words the native sampler draws, for tests."""
    words = torch.empty(len(seeds), vocab_size, dtype=torch.int64)
    native.function("specdec_philox", "ppiip")(
        seeds.data_ptr(), positions.data_ptr(), len(seeds), vocab_size, words.data_ptr()
    )
    return words
