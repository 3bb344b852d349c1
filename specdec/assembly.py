"""Assembly: from an EngineConfig to a running Engine.

It knows the order in which models, memory, pool and proposer are built, and resolves every "auto"
on the way. It takes no part in a step.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from specdec import kv_cache
from specdec.block_pool import BlockPool
from specdec.config import METHODS, EngineConfig, ModelConfig, SpeculativeConfig
from specdec.controller import FixedLength
from specdec.engine import Engine
from specdec.errors import InvalidRequestError, ModelLoadError
from specdec.models import eagle_runner, sources
from specdec.models.eagle_head import EagleHead, is_feature_draft, load_eagle
from specdec.models.eagle_runner import EagleRunner
from specdec.models.loaded import LoadedModel
from specdec.models.loader import load, pick_dtype
from specdec.models.runner import ModelRunner
from specdec.proposers import DEFAULT_NUM_SPECULATIVE_TOKENS, build_proposer
from specdec.proposers.shipped import shipped_draft
from specdec.scheduler import Scheduler
from specdec.threads import use_threads
from specdec.tokenizer import first_difference

logger = logging.getLogger("specdec")


def resolve_draft(draft: str | None, speculative: SpeculativeConfig, target: str = "") -> SpeculativeConfig:
    """Turn `draft` and `method` into one method.

    draft    None, "ngram", "suffix", "hybrid" (both), a model of the same tokenizer, a draft over the target's
             features, or "auto": the draft that ships for the target together with both, or just both
    target   as it was named; drafts that ship are found by it
    """
    if speculative.method != "auto":
        return _say_once(draft, speculative)
    if speculative.draft is not None and draft in (None, "auto"):
        draft = speculative.draft
    if speculative.num_speculative_tokens == 0 or draft is None:
        return replace(speculative, method="none", draft=None)
    if draft == "auto":
        shipped = shipped_draft(target)
        if shipped is not None and speculative.acceptance == "rejection":  # a hybrid picks after the draw
            return replace(speculative, method="draft_model", draft=str(shipped))
        return replace(speculative, method="hybrid", draft=None if shipped is None else str(shipped))
    if draft == "ngram":
        return replace(speculative, method="ngram", draft=None)
    if draft == "suffix":
        return replace(speculative, method="suffix", draft=None)
    if draft == "hybrid":
        return replace(speculative, method="hybrid", draft=None)
    return replace(speculative, method="draft_model", draft=draft)


def _say_once(draft: str | None, speculative: SpeculativeConfig) -> SpeculativeConfig:
    """A method that was named: `draft` may repeat it, or name the model a hybrid shall use."""
    if draft in (None, "auto", speculative.method, speculative.draft):
        return speculative
    if speculative.method == "hybrid" and speculative.draft is None and draft not in METHODS:
        return replace(speculative, draft=draft)
    raise InvalidRequestError(
        f"draft is {draft!r} but the speculative config says method {speculative.method!r} and draft "
        f"{speculative.draft!r}; say it once",
        param="draft",
    )


def tell_kind(speculative: SpeculativeConfig) -> SpeculativeConfig:
    """Look into the directory of a draft: one over the target's features is no model of its own."""
    if speculative.method != "draft_model" or not is_feature_draft(sources.resolve(str(speculative.draft))):
        return speculative
    return replace(speculative, method="eagle")


def build(config: EngineConfig) -> Engine:
    """Load the models, size the cache, connect the rooms."""
    num_threads = use_threads(config.num_threads)
    config = replace(config, speculative=tell_kind(config.speculative))
    target = load(config.target)
    draft = _load_draft(config, target)
    num_blocks = _count_blocks(config, target, draft)
    _log_capacity(config, num_blocks, target, draft)
    if target.device.type == "cpu":
        logger.info("CPU kernels use %d threads (--num-threads)", num_threads)
    block_size = config.cache.block_size
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=config.cache.enable_prefix_caching)
    target_runner = ModelRunner(target, num_blocks, block_size)
    draft_runner = _draft_runner(draft, num_blocks, block_size)
    proposer = build_proposer(config.speculative, config.scheduler, pool, target_runner, draft_runner)
    most = config.speculative.num_speculative_tokens
    engine = Engine(
        target_runner,
        proposer,
        FixedLength(
            DEFAULT_NUM_SPECULATIVE_TOKENS[config.speculative.method] if most is None else most,
            proposer.max_draft_position,
        ),
        Scheduler(config.scheduler, pool),
        max_model_len=target.max_model_len,
        seed=config.seed,
    )
    if not config.speculative.forced_tokens:
        engine.guide.most_forced = 0
    return engine


Draft = LoadedModel | EagleHead


def _draft_runner(draft: Draft | None, num_blocks: int, block_size: int) -> ModelRunner | EagleRunner | None:
    if isinstance(draft, EagleHead):
        return EagleRunner(draft, num_blocks, block_size)
    return ModelRunner(draft, num_blocks, block_size) if draft is not None else None


def _load_draft(config: EngineConfig, target: LoadedModel) -> Draft | None:
    name = config.speculative.draft
    if name is None:
        return None
    follow = ModelConfig(
        model=name, dtype=str(target.dtype).removeprefix("torch."), quantization=config.target.quantization
    )
    own = config.draft or follow
    if config.speculative.method == "eagle" or is_feature_draft(sources.resolve(name)):
        return load_eagle(sources.resolve(name), target, pick_dtype(own.dtype, target.device))
    draft = load(own)
    if target.tokenizer is not None and draft.tokenizer is not None:
        difference = first_difference(target.tokenizer, draft.tokenizer)
        if difference is not None:
            raise ModelLoadError(f"draft {name} has another tokenizer than the target: {difference}")
    return draft


def _block_bytes(model: Draft | None, block_size: int) -> int:
    if isinstance(model, EagleHead):
        return eagle_runner.bytes_per_block(model, block_size)
    return kv_cache.bytes_per_token(model.attention.shapes, model.dtype) * block_size if model is not None else 0


def _count_blocks(config: EngineConfig, target: LoadedModel, draft: Draft | None) -> int:
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    memory = cache.kv_cache_memory
    if memory is None:
        memory = kv_cache.free_memory(target.device, cache.gpu_memory_utilization)
    block_bytes = _block_bytes(target, cache.block_size) + _block_bytes(draft, cache.block_size)
    return kv_cache.count_blocks(memory, cache.block_size, block_bytes)


def _log_capacity(config: EngineConfig, num_blocks: int, target: LoadedModel, draft: Draft | None) -> None:
    size = config.cache.block_size
    ours, drafts = _block_bytes(target, size), _block_bytes(draft, size)
    logger.info(
        "%d blocks of %d tokens: about %d tokens, %.1f requests of max_model_len %d; the draft takes %.0f %% of them",
        num_blocks, size, num_blocks * size, num_blocks * size / target.max_model_len, target.max_model_len,
        100 * drafts / (ours + drafts),
    )  # fmt: skip
