"""Processors: what changes scores before the temperature does, in place and only where ids are touched.

The order is that of vLLM's V1 sampler: a grammar's mask, allowed_token_ids, bad_words, min_tokens, logit_bias, then
the repetition, frequency and presence penalties. (Temperature, min_p, top_k and top_p follow; see `filters`.)
They know rows of scores and the rules of whoever asked; nothing is remembered between calls.
(Repetition penalty: Keskar et al. 2019, arXiv 1909.05858, section 4.1, over prompt and output.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.sampling.choice import Choice
from specdec.token_counts import Ints

_NEVER = float("-inf")


class _Pairs:
    """Ragged (row, id) pairs of a block of scores, as flat places; ids the scores do not have are dropped.

    index   [N]
    """

    def __init__(self, scores: Tensor, rows: Sequence[int], ids: Sequence[Ints]) -> None:
        vocab_size = scores.shape[1]
        flat_ids = np.concatenate(ids)
        self._lengths = [len(i) for i in ids]
        self._inside = flat_ids < vocab_size
        self._device, self._dtype = scores.device, scores.dtype
        places = np.repeat(np.array(rows, np.int64) * vocab_size, self._lengths) + flat_ids
        self.index = torch.from_numpy(places[self._inside]).to(self._device)

    def values(self, parts: Sequence[NDArray[np.generic]]) -> Tensor:
        """Numbers given pair by pair, [N]."""
        inside = np.concatenate(parts)[self._inside]
        return torch.from_numpy(inside).to(self._device, self._dtype)

    def per_row(self, numbers: Sequence[float]) -> Tensor:
        """One number a row, given to each of its pairs, [N]."""
        inside = np.repeat(np.array(numbers, np.float64), self._lengths)[self._inside]
        return torch.from_numpy(inside).to(self._device, self._dtype)


def edit(scores: Tensor, choices: Sequence[Choice]) -> None:
    """Apply the rules of every row to its scores, in place.

    scores   [R, V]   contiguous; float32 or float64
    """
    assert scores.is_contiguous() and scores.shape[0] == len(choices)
    rows = [i for i, choice in enumerate(choices) if choice.is_edited]
    guarded = _keep_grammatical(scores, choices, rows)
    _keep_allowed(scores, choices, rows)
    _ban(scores, choices, rows)
    _let_grammars_win(scores, guarded)
    _add_bias(scores, choices, rows)
    _penalise(scores, choices, [i for i in rows if choices[i].request.counts is not None])


def _keep_grammatical(scores: Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> tuple[list[int], Tensor]:
    """Mask rows with a grammar; return those that other rules narrow further, and what the grammar left them."""
    masked = [i for i in rows if choices[i].request.grammar is not None]
    if not masked:
        return [], scores[:0]
    bits = np.stack([choices[i].grammar_mask() for i in masked])
    allowed = np.unpackbits(bits, axis=1, count=min(scores.shape[1], 8 * bits.shape[1]), bitorder="little")
    is_allowed = torch.from_numpy(allowed.view(np.bool_)).to(scores.device)
    if is_allowed.shape[1] < scores.shape[1]:  # ids the tokenizer does not have
        is_allowed = torch.nn.functional.pad(is_allowed, (0, scores.shape[1] - is_allowed.shape[1]))
    index = torch.tensor(masked, device=scores.device)
    scores[index] = scores[index].masked_fill_(~is_allowed, _NEVER)
    guarded = [i for i in masked if (r := choices[i].request.rules).bans or r.allowed is not None]
    return guarded, scores[torch.tensor(guarded, dtype=torch.int64, device=scores.device)]


def _let_grammars_win(scores: Tensor, guarded: tuple[list[int], Tensor]) -> None:
    """Where other rules left nothing of what the grammar allows, they are dropped for that token."""
    rows, before = guarded
    if not rows:
        return
    index = torch.tensor(rows, device=scores.device)
    is_empty = scores[index].amax(dim=1) == _NEVER
    scores[index[is_empty]] = before[is_empty]


def _keep_allowed(scores: Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> None:
    allowed = {i: ids for i in rows if (ids := choices[i].request.rules.allowed) is not None}
    if not allowed:
        return
    pairs = _Pairs(scores, list(allowed), list(allowed.values()))
    flat = scores.view(-1)
    kept = flat[pairs.index]
    scores.index_fill_(0, torch.tensor(list(allowed), device=scores.device), _NEVER)
    flat[pairs.index] = kept


def _ban(scores: Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> None:
    banned = {i: ids for i in rows if choices[i].request.rules.bans and len(ids := choices[i].banned())}
    if banned:
        scores.view(-1)[_Pairs(scores, list(banned), list(banned.values())).index] = _NEVER


def _add_bias(scores: Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> None:
    biased = [i for i in rows if len(choices[i].request.rules.bias_ids)]
    if not biased:
        return
    rules = [choices[i].request.rules for i in biased]
    pairs = _Pairs(scores, biased, [r.bias_ids for r in rules])
    flat = scores.view(-1)
    flat[pairs.index] = flat[pairs.index] + pairs.values([r.bias for r in rules])


def _penalise(scores: Tensor, choices: Sequence[Choice], rows: Sequence[int]) -> None:
    if not rows:
        return
    seen = [choices[i].counts() for i in rows]
    rules = [choices[i].request.rules for i in rows]
    pairs = _Pairs(scores, rows, [ids for ids, _ in seen])
    counts = pairs.values([count for _, count in seen])
    repetition = pairs.per_row([r.repetition for r in rules])
    flat = scores.view(-1)
    values = flat[pairs.index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= pairs.per_row([r.frequency for r in rules]) * counts
    values -= pairs.per_row([r.presence for r in rules]) * (counts > 0)
    flat[pairs.index] = values
