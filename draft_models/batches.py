"""Batches: samples with features, padded into the rows a head trains on; it knows lengths and nothing of heads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from draft_models.features import Sample
from draft_models.head import Rows


def predicting_rows(sample: Sample) -> int:
    """Rows of a sample that predict an answer token from a feature and a token, at step 0."""
    return max(0, len(sample.ids) - 1 - max(sample.answer_start, 1))


def pad(samples: Sequence[Sample], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rows:
    """One Rows of several samples; padding is zeros on the right."""
    longest = max(len(s.ids) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    features = torch.zeros(len(samples), longest, samples[0].features.shape[1], dtype=dtype)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        features[row, : len(sample.ids)] = sample.features
    first = torch.tensor([max(s.answer_start, 1) - 1 for s in samples])
    num_rows = torch.tensor([predicting_rows(s) for s in samples])
    return Rows(ids.to(device), features.to(device), first.to(device), num_rows.to(device))


def group(samples: Sequence[Sample], most: int, seed: int) -> Iterator[list[Sample]]:
    """Batches of similar answer length with at most `most` predicting rows after padding, in random order."""
    usable = sorted((s for s in samples if predicting_rows(s)), key=predicting_rows)
    batches: list[list[Sample]] = [[]]
    for sample in usable:
        if batches[-1] and (len(batches[-1]) + 1) * predicting_rows(sample) > most:
            batches.append([])
        batches[-1].append(sample)
    random.Random(seed).shuffle(batches)
    yield from (batch for batch in batches if batch)
