"""The shared-noise sampler: y_t = argmax(log p_t + g_t), with g_t fixed by (seed, t, token id).

Plain decoding, verification and drafting all choose here, so that the same request meets the same
noise at the same output position whoever asks. It knows parameters and scores, not why a row is asked.
(Gumbel coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec.kernels.accept import sample
from specdec.sampling.choice import Choice
from specdec.sampling.filters import filter_rows
from specdec.sampling.processors import edit

_CACHED_BYTES = 2**21
"""Rows are processed in blocks of this size on CPU, which a core's cache holds."""


@torch.inference_mode()
def choose(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], list[bool]]:
    """Choose one token for every row of scores.

    logits   [L, V]   any floating type; computed in float32, or float64 where the model is
    returns  token ids [L] and, for each row, whether its scores were finite

    This reads the result back: it is the one synchronisation of a step. Rows that only scale their
    scores are read where they lie; the others are copied and processed, a few at a time.
    """
    if not choices:
        return [], []
    assert logits.ndim == 2 and logits.shape[0] == len(choices)
    token_ids = torch.zeros(len(choices), dtype=torch.int64, device=logits.device)
    is_finite = torch.zeros(len(choices), dtype=torch.bool, device=logits.device)
    plain = [i for i, choice in enumerate(choices) if not (choice.is_edited or choice.is_filtered)]
    if len(plain) == len(choices):
        token_ids, is_finite = _sample(logits, choices, [c.request.params.temperature for c in choices])
        return token_ids.tolist(), is_finite.tolist()
    if plain:
        index = torch.tensor(plain, device=logits.device)
        own = [choices[i] for i in plain]
        chosen = _sample(logits[index], own, [c.request.params.temperature for c in own])
        token_ids[index], is_finite[index] = chosen
    is_plain = set(plain)
    for block in blocks(logits, [i for i in range(len(choices)) if i not in is_plain]):
        index = torch.tensor(block, device=logits.device)
        own = [choices[i] for i in block]
        token_ids[index], is_finite[index] = _sample(*_processed(logits[index], own))
    return token_ids.tolist(), is_finite.tolist()


def process(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The scores whose softmax is the law each row is drawn from; of a greedy row, before the maximum is taken.

    logits   [R, V]   a copy that may be changed
    """
    scores, choices, temperatures = _processed(logits, choices)
    scale = [1.0 if c.request.params.is_greedy else t for c, t in zip(choices, temperatures, strict=True)]
    return scores / torch.tensor(scale, dtype=scores.dtype, device=scores.device)[:, None]


def blocks(logits: Tensor, rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut row numbers into runs that a cache holds; one run on an accelerator."""
    size = len(rows)
    if logits.device.type == "cpu":
        size = max(_CACHED_BYTES // (logits.shape[1] * (8 if logits.dtype == torch.float64 else 4)), 1)
    for start in range(0, len(rows), max(size, 1)):
        yield rows[start : start + size]


def _sample(logits: Tensor, choices: Sequence[Choice], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return sample(
        logits,
        torch.tensor([c.request.noise_seed for c in choices], dtype=torch.int64, device=logits.device),
        torch.tensor([c.position for c in choices], dtype=torch.int64, device=logits.device),
        torch.tensor(temperatures, dtype=dtype, device=logits.device),
    )


def _processed(logits: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Sequence[Choice], list[float]]:
    """Edited and filtered scores, and the temperatures still to apply (1 where a filter needed it applied).

    logits   [R, V]   a copy that may be changed
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
    edit(scores, choices)
    temperatures = [c.request.params.temperature for c in choices]
    filtered = [i for i, choice in enumerate(choices) if choice.is_filtered]
    if not filtered:
        return scores, choices, temperatures
    params = [choices[i].request.params for i in filtered]
    scale = torch.tensor([p.temperature for p in params], dtype=scores.dtype, device=scores.device)[:, None]
    limits = [p.top_k for p in params], [p.top_p for p in params], [p.min_p or 0.0 for p in params]
    if len(filtered) == len(choices):
        return filter_rows(scores.div_(scale), *limits), choices, [1.0] * len(choices)
    index = torch.tensor(filtered, device=scores.device)
    scores[index] = filter_rows(scores[index].div_(scale), *limits)
    for i in filtered:
        temperatures[i] = 1.0
    return scores, choices, temperatures
