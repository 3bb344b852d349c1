"""The shared-noise sampler: y_t = argmax(log p_t + g_t), with g_t fixed by (seed, t, token id).

Plain decoding, verification and drafting all choose here, so that the same request meets the same
noise at the same output position whoever asks. It knows parameters and scores, not why a row is asked.
(Gumbel coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specdec.kernels.accept import accept, noise_of, sample, sample_host, uses_native, uses_triton
from specdec.kernels.nucleus import nucleus
from specdec.request import Request
from specdec.sampling.choice import Choice, is_plain
from specdec.sampling.filters import Limits, Shortlist, keep, mask, shortlist
from specdec.sampling.processors import edit
from specdec.staging import read, to_device

_CACHED_BYTES = 2**23
"""Rows are processed in blocks of this size on CPU: few enough for the caches, enough for the calls to be cheap."""

_MOST_LISTED = 512
"""A shortlist longer than this costs more to draw noise for, token by token, than its whole row does."""


def choose(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], list[bool]]:
    """Choose one token for every row of scores.

    logits   [L, V]   any floating type; computed in float32, or float64 where the model is
    returns  token ids [L] and, for each row, whether its scores were finite

    Rows that only scale their scores are read where they lie; the others are copied and processed, a
    few at a time. Where filters leave few tokens, noise is drawn for those alone.
    """
    if not choices:
        return [], []
    assert logits.ndim == 2 and logits.shape[0] == len(choices)
    if uses_native(logits) and not any(choice.is_edited or choice.is_filtered for choice in choices):
        temperatures = [choice.request.params.temperature for choice in choices]
        return sample_host(logits, *_streams(choices), temperatures)
    return _choose_any(logits, choices)


def choose_plain(logits: Tensor, rows: Sequence[tuple[Request, int]]) -> tuple[list[int], list[bool]] | None:
    """As `choose`, for rows that only scale their scores, without a value for each of them.

    rows      each request and how many of the next rows of scores are its own, at successive output positions
    returns   as `choose`; None where a row asks for more, or the device has a way of its own
    """
    if not uses_native(logits) or not all(is_plain(request) for request, _ in rows):
        return None
    seeds: list[int] = []
    positions: list[int] = []
    temperatures: list[float] = []
    for request, size in rows:
        first = request.num_output_tokens
        seeds += [request.noise_seed] * size
        positions += range(first, first + size)
        temperatures += [request.params.temperature] * size
    assert len(seeds) == logits.shape[0]
    return sample_host(logits, seeds, positions, temperatures) if seeds else ([], [])


@torch.inference_mode()
def _choose_any(logits: Tensor, choices: Sequence[Choice]) -> tuple[list[int], list[bool]]:
    """On any device, whatever the rows ask for."""
    plain = [i for i, choice in enumerate(choices) if not (choice.is_edited or choice.is_filtered)]
    if len(plain) == len(choices):
        return _read(*_sample(logits, choices))
    token_ids = torch.zeros(len(choices), dtype=torch.int64, device=logits.device)
    is_finite = torch.zeros(len(choices), dtype=torch.bool, device=logits.device)
    for rows in blocks(logits, plain):
        index = torch.tensor(rows, device=logits.device)
        token_ids[index], is_finite[index] = _sample(take(logits, rows), [choices[i] for i in rows])
    is_plain = set(plain)
    for rows in blocks(logits, [i for i in range(len(choices)) if i not in is_plain]):
        index = torch.tensor(rows, device=logits.device)
        token_ids[index], is_finite[index] = _choose_processed(take(logits, rows), [choices[i] for i in rows])
    return _read(token_ids, is_finite)


def _read(token_ids: Tensor, is_finite: Tensor) -> tuple[list[int], list[bool]]:
    ids, finite = read(token_ids, is_finite)
    return ids, list(map(bool, finite))


def can_judge_on_device(logits: Tensor, choices: Sequence[Choice]) -> bool:
    """Say whether `judge_on_device` takes these rows."""
    return uses_triton(logits) and bool(choices) and not any(c.is_edited or c.is_filtered for c in choices)


@torch.inference_mode()
def judge_on_device(
    logits: Tensor, choices: Sequence[Choice], drafts: Sequence[Sequence[int]]
) -> list[tuple[int, ...]] | None:
    """Choose and verify on the device: one pass over the scores, one transfer.

    logits   [L, V]
    drafts   [B]      of every row; L = sum of len(drafts[b]) + 1
    returns  of every row: accepted drafts and the token behind them; None where any row's scores failed, for
             then what came before them has to be looked up
    """
    device = logits.device
    first = [0, *accumulate(len(row) + 1 for row in drafts)]
    judged = accept(
        logits,
        *streams(choices, device),
        _temperatures(logits, choices),
        to_device([token_id for row in drafts for token_id in (*row, 0)], device, torch.int64),
        to_device(first, device, torch.int32),
    )
    token_ids, num_accepted, finite = read(judged.token_ids, judged.num_accepted, judged.is_finite)
    if not all(finite):
        return None
    return [tuple(token_ids[i : i + num + 1]) for i, num in zip(first, num_accepted, strict=False)]


def process(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The scores whose softmax is the law each row is drawn from; of a greedy row, before the maximum is taken.

    logits   [R, V]   a copy that may be changed
    """
    scores = _wide(_edited(logits, choices))
    filtered = [i for i, choice in enumerate(choices) if choice.is_filtered]
    if filtered:
        index = torch.tensor(filtered, device=scores.device)
        part = scores[index]
        scores[index] = keep(part, _limits(part, [choices[i] for i in filtered]))
    params = [c.request.params for c in choices]
    scale = [1.0 if p.is_greedy else p.temperature for p in params]
    return scores / torch.tensor(scale, dtype=scores.dtype, device=scores.device)[:, None]


def blocks(logits: Tensor, rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut row numbers into runs of a size that suits the CPU; one run on an accelerator."""
    size = len(rows)
    if logits.device.type == "cpu":
        size = max(_CACHED_BYTES // (logits.shape[1] * (8 if logits.dtype == torch.float64 else 4)), 1)
    for start in range(0, len(rows), max(size, 1)):
        yield rows[start : start + size]


def take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, ascending: a view where they follow each other, else a copy."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return logits[rows[0] : rows[-1] + 1]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _edited(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """A wide copy where any row edits its scores; else the logits as they are."""
    if not any(choice.is_edited for choice in choices):
        return logits
    scores = _wide(logits)
    scores = (scores.clone() if scores.data_ptr() == logits.data_ptr() else scores).contiguous()
    edit(scores, choices)
    return scores


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _limits(scores: Tensor, choices: Sequence[Choice]) -> Limits:
    params = [choice.request.params for choice in choices]
    return Limits.of(scores, [(p.top_k, p.top_p, p.min_p or 0.0, p.temperature) for p in params])


def _sample(logits: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Over whole rows: logits [R, V] -> token ids and whether finite, [R]."""
    return sample(logits, *streams(choices, logits.device), _temperatures(logits, choices))


def _temperatures(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return to_device([c.request.params.temperature for c in choices], logits.device, dtype)


def streams(choices: Sequence[Choice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and position of every row's noise, [R] each."""
    both = to_device(_streams(choices), device, torch.int64)
    return both[0], both[1]


def _streams(choices: Sequence[Choice]) -> tuple[list[int], list[int]]:
    return [choice.request.noise_seed for choice in choices], [choice.position for choice in choices]


def _choose_processed(logits: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Edit a block of rows, filter those that ask, and choose: logits [R, V] -> [R], [R]."""
    scores = _edited(logits, choices)
    token_ids = torch.zeros(len(choices), dtype=torch.int64, device=logits.device)
    is_finite = torch.zeros(len(choices), dtype=torch.bool, device=logits.device)
    choosers = [_chooser(choice, logits.shape[1]) for choice in choices]
    for chooser in (_sample, _sample_nucleus, _sample_shortlist):
        rows = [i for i, own in enumerate(choosers) if own is chooser]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            token_ids[index], is_finite[index] = chooser(take(scores, rows), [choices[i] for i in rows])
    return token_ids, is_finite


def _chooser(choice: Choice, vocab_size: int) -> Callable[[Tensor, Sequence[Choice]], tuple[Tensor, Tensor]]:
    if not choice.is_filtered:
        return _sample
    return _sample_shortlist if 0 < choice.request.params.top_k < vocab_size else _sample_nucleus


def _sample_nucleus(scores: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Choose among what min_p and top_p keep: scores [R, V], edited and undivided -> [R], [R]."""
    limits = _limits(scores, choices)
    return _sample(nucleus(scores, limits.temperature, limits.top_p, limits.min_p), choices)


def _sample_shortlist(scores: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Choose where top_k cuts, and maybe others: scores [R, V], edited and undivided -> [R], [R]."""
    scores = _wide(scores)
    limits = _limits(scores, choices)
    short = shortlist(scores, limits)
    token_ids, is_finite = _sample_listed(short, limits, choices)
    wide = torch.nonzero(short.keep > _MOST_LISTED)[:, 0]
    if len(wide):
        token_ids[wide], is_finite[wide] = _sample(mask(scores, short)[wide], [choices[i] for i in wide.tolist()])
    return token_ids, is_finite


def _sample_listed(short: Shortlist, limits: Limits, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Noise for the tokens on the lists alone; rows whose list is long get a value of no meaning."""
    scores, ids = short.found.scores[:, :_MOST_LISTED], short.found.ids[:, :_MOST_LISTED]
    is_kept = torch.arange(scores.shape[1], device=scores.device) < short.keep[:, None]
    rows, places = torch.nonzero(is_kept, as_tuple=True)
    seeds, positions = streams(choices, scores.device)
    g = noise_of(seeds[rows], positions[rows], ids[rows, places], scores.dtype)
    noisy = torch.full_like(scores, float("-inf"))
    noisy[rows, places] = scores[rows, places] / limits.temperature[rows].to(scores.dtype) + g
    best = noisy.amax(dim=1)
    is_best = noisy == best[:, None]
    token_ids = ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(dim=1)  # the lowest of equals
    is_finite = torch.isfinite(best)
    return token_ids.masked_fill(~is_finite, 0), is_finite
