"""Calls into native/accept.cpp."""

from array import array
from collections.abc import Sequence

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


def sample_host(
    logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
) -> tuple[list[int], list[bool]]:
    """As `sample`, without a tensor but the scores: behind a forward every one costs its way back into the caches."""
    num_rows, vocab_size = logits.shape
    logits = logits.contiguous()
    rounded = array("d" if logits.dtype == torch.float64 else "f", temperatures)  # 1e-5 as the twin sees it
    given = (array("q", seeds), array("q", positions), array("d", rounded))
    token_ids, is_finite = array("q", bytes(8 * num_rows)), array("b", bytes(num_rows))
    native.function("specdec_sample", "ppppppiiii")(
        logits.data_ptr(),
        *(numbers.buffer_info()[0] for numbers in (*given, token_ids, is_finite)),
        num_rows,
        vocab_size,
        native.DTYPES[logits.dtype],
        torch.get_num_threads(),
    )
    return token_ids.tolist(), list(map(bool, is_finite))


def bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """As the twin: the words the native sampler draws, for tests."""
    words = torch.empty(len(seeds), vocab_size, dtype=torch.int64)
    native.function("specdec_philox", "ppiip")(
        seeds.data_ptr(), positions.data_ptr(), len(seeds), vocab_size, words.data_ptr()
    )
    return words
