"""Scales of an fp8 cache: how large a model's keys and values get, head by head, on a fixed text.

It knows one forward and the format's range. The text is token ids spread over the vocabulary, the same in every
process, so a model has the same scales wherever it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kv_cache import Scales
from specdec.models.forward_batch import Segment
from specdec.models.loaded import LoadedModel
from specdec.models.runner import ModelRunner

LARGEST = 448.0  # of e4m3
HEADROOM = 2.0  # what is larger than this times the largest number seen is held at the end of the range
NUM_TOKENS = 512
_BLOCK_SIZE = 16
_STRIDE = 7919  # a prime, so that neighbours are not alike


def kv_scales(model: LoadedModel) -> Scales:
    """A power of two for every KV head, of the keys and of the values of each layer, [G] float32.

    Powers of two round nothing themselves: dividing by them and multiplying again is exact.
    """
    num_tokens = min(NUM_TOKENS, model.max_model_len)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    runner = ModelRunner(model, num_blocks, _BLOCK_SIZE)
    token_ids = [i * _STRIDE % model.vocab_size for i in range(num_tokens)]
    runner.forward(runner.pack([Segment(token_ids, 0, range(num_blocks), 1)]))
    return [(_scale(keys), _scale(values)) for keys, values in zip(runner.cache.keys, runner.cache.values, strict=True)]


def _scale(stored: Tensor) -> Tensor:
    """stored [num_blocks, block_size, G, D] -> [G]; 1 for a head that is zero or not finite."""
    largest = stored.float().abs().amax((0, 1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest * HEADROOM / LARGEST)))
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
