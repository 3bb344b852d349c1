"""An fp8 cache: the same tokens with and without drafts, scales from one fixed text, and what it saves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import specdec
from specdec.config import ModelConfig, SpeculativeConfig
from specdec.kv_cache import FP8, KVCache, Scales
from specdec.llm import LLM
from specdec.models.forward_batch import Segment
from specdec.models.kv_scales import HEADROOM, LARGEST, kv_scales
from specdec.models.loaded import LoadedModel
from specdec.models.loader import load
from specdec.models.runner import ModelRunner
from tests.engines import ids

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], list(range(40, 57)), [1, 2, 3, 1, 2, 3, 1, 9]]


def build(target: str, draft: str | None, **options: Any) -> LLM:
    """In float64, so that no rounding but the cache's own excuses a fork; a small pool, so that rows are preempted."""
    speculative = SpeculativeConfig(num_speculative_tokens=3, adaptive=False)
    options = {"dtype": "float64", "block_size": 4, "num_kv_blocks": 16, "kv_cache_dtype": "fp8", **options}
    return LLM(target, draft, speculative=speculative, **options)


@pytest.fixture(scope="module")
def plain(toy: str) -> LLM:
    return build(toy, None)


@pytest.mark.parametrize("draft", ["ngram", "self"])
def test_drafts_change_no_token(plain: LLM, toy: str, draft: str) -> None:
    """The model as its own draft keeps a cache of its own dtype: nearly always right, now and then not."""
    made = build(toy, toy if draft == "self" else draft)
    assert all(keys.dtype == FP8 for keys in made.engine.target.cache.keys)
    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        own = {"max_tokens": 16, "ignore_eos": True, **params}
        assert ids(made, PROMPTS, **own) == ids(plain, PROMPTS, **own)
    assert made.engine.scheduler.num_preemptions > 0


def test_the_numbers_are_those_of_the_format(toy: str) -> None:
    """The first layer holds its own numbers to three bits; what follows reads those, so scores move a little."""
    model = load(ModelConfig(model=toy, dtype="float64"))
    scales = kv_scales(model)
    (exact, own), (stored, fp8) = (ran(model, kind) for kind in (None, scales))
    pairs = ((own.keys[0], fp8.keys[0]), (own.values[0], fp8.values[0]))
    for (x, cached), scale in zip(pairs, scales[0], strict=True):
        error = (cached.double() * scale[:, None] - x).abs()
        assert (error <= x.abs() / 16 + scale[:, None] * 2.0**-10).all() and error.any()
    assert 1e-3 < (stored - exact).abs().mean() / exact.std() < 0.3


def ran(model: LoadedModel, scales: Scales | None) -> tuple[torch.Tensor, KVCache]:
    """Scores of 60 tokens, and the cache, of a runner made for it: modules know the last runner that was made."""
    runner = ModelRunner(model, 8, 16, scales)
    return runner.forward(runner.pack([Segment(list(range(60)), 0, range(8), 60)])), runner.cache


def test_scales_are_powers_of_two_that_hold_what_was_seen(toy: str) -> None:
    model = load(ModelConfig(model=toy, dtype="float64"))
    scales = kv_scales(model)
    runner = ModelRunner(model, 32, 16)
    runner.forward(runner.pack([Segment([i * 7919 % model.vocab_size for i in range(512)], 0, range(32), 1)]))
    for (k_scales, _), keys in zip(scales, runner.cache.keys, strict=True):
        largest = keys.abs().amax((0, 1, 3)) / k_scales
        assert torch.equal(torch.log2(k_scales), torch.log2(k_scales).round())
        assert (largest * HEADROOM <= LARGEST).all() and (largest * HEADROOM > LARGEST / 2).all()
    assert all(torch.equal(a, b) for one, other in zip(scales, kv_scales(model)) for a, b in zip(one, other))


def test_the_same_memory_holds_more_tokens(toy: str) -> None:
    blocks = [
        build(
            toy, None, dtype="float32", num_kv_blocks=None, kv_cache_memory=2**20, kv_cache_dtype=name
        ).engine.scheduler.pool.num_blocks
        for name in ("auto", "fp8")
    ]
    assert blocks[1] // 4 == blocks[0]


def test_native_linears_serve_it_and_a_prefix_is_reused(toy: str, caplog: pytest.LogCaptureFixture) -> None:
    """float32 on a CPU: transformers' forward over packed linears; attention is the twin, and that is said."""
    with caplog.at_level(logging.WARNING, "specdec"):
        made = build(toy, "ngram", dtype="float32", num_kv_blocks=64)
    assert "plain PyTorch attends" in caplog.text
    first = ids(made, [PROMPTS[1]], max_tokens=8)
    assert ids(made, [PROMPTS[1]], max_tokens=8) == first
    assert made.engine.scheduler.pool.num_hit_tokens > 0


def test_another_name_is_refused() -> None:
    with pytest.raises(specdec.InvalidRequestError, match="kv_cache_dtype is 'int2'; it must be one of auto, fp8"):
        specdec.LLM("nowhere", None, kv_cache_dtype="int2")
