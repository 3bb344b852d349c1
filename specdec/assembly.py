"""Assembly: from an EngineConfig to a running Engine.

It knows the order in which models, memory, pool and proposer are built, and resolves every "auto"
on the way. It takes no part in a step.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

from specdec import kv_cache
from specdec.block_pool import BlockPool
from specdec.config import METHODS, EngineConfig, ModelConfig, SpeculativeConfig
from specdec.control.adaptive import AdaptiveLength
from specdec.control.cost import ForwardCost
from specdec.control.load import Sources
from specdec.control.trace import TraceFile
from specdec.controller import Controller, FixedLength
from specdec.engine import Engine
from specdec.errors import InvalidRequestError, ModelLoadError
from specdec.kernels import dispatch, native
from specdec.models import eagle_runner, sources
from specdec.models.compiled import compile_layers
from specdec.models.eagle_head import EagleHead, is_feature_draft, load_eagle
from specdec.models.eagle_runner import EagleRunner
from specdec.models.kv_scales import kv_scales
from specdec.models.loaded import LoadedModel
from specdec.models.loader import load, pick_dtype
from specdec.models.profile import profile
from specdec.models.runner import ModelRunner
from specdec.proposers import DEFAULT_NUM_SPECULATIVE_TOKENS, build_proposer, most_drafts
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.hybrid import HybridProposer
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
    draft = None if draft == "none" else draft
    if draft is None and (speculative.method not in ("auto", "none") or speculative.draft is not None):
        raise _contradiction(draft, speculative)
    if speculative.method != "auto":
        return _say_once(draft, speculative)
    if speculative.draft is not None:
        if draft not in ("auto", "hybrid", speculative.draft):
            raise _contradiction(draft, speculative)
        draft = speculative.draft if draft == "auto" else draft
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
        return replace(speculative, method="hybrid")  # with the model the config names, where it names one
    return replace(speculative, method="draft_model", draft=draft)


def _say_once(draft: str | None, speculative: SpeculativeConfig) -> SpeculativeConfig:
    """A method that was named: `draft` may repeat it, or name the model a hybrid shall use."""
    if draft in (None, "auto", speculative.method, speculative.draft):
        return speculative
    if speculative.method == "hybrid" and speculative.draft is None and draft not in METHODS:
        return replace(speculative, draft=draft)
    raise _contradiction(draft, speculative)


def _contradiction(draft: str | None, speculative: SpeculativeConfig) -> InvalidRequestError:
    return InvalidRequestError(
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
    around = dispatch.twins_only if config.compile == "off" else nullcontext
    with around():
        engine = _build(config)
    engine.around_step = around
    _return_memory()
    return engine


def _return_memory() -> None:
    """Give the system what loading has freed, which glibc's allocator would keep: a checkpoint's worth of memory."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _build(config: EngineConfig) -> Engine:
    num_threads = use_threads(config.num_threads)
    if dispatch.mode() == "auto":  # the first start builds while it fetches a model
        threading.Thread(target=native.library, daemon=True).start()
    config = replace(config, speculative=tell_kind(config.speculative))
    target = _load_target(config)
    draft = _load_draft(config, target)
    num_blocks = _count_blocks(config, target, draft)
    _log_capacity(config, num_blocks, target, draft)
    if target.device.type == "cpu":
        logger.info("CPU kernels use %d threads (--num-threads)", num_threads)
    block_size = config.cache.block_size
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=config.cache.enable_prefix_caching)
    scales = kv_scales(target) if config.cache.kv_cache_dtype == "fp8" else None
    target_runner = ModelRunner(target, num_blocks, block_size, scales)
    draft_runner = _draft_runner(draft, num_blocks, block_size)
    proposer = build_proposer(config.speculative, config.scheduler, pool, target_runner, draft_runner)
    if config.compile == "max":  # behind the proposer, which may have asked for features
        for runner in (target_runner, draft_runner):
            if isinstance(runner, ModelRunner):
                compile_layers(runner)
    engine = Engine(
        target_runner,
        proposer,
        build_controller(config, proposer, target_runner, draft_runner),
        Scheduler(config.scheduler, pool),
        max_model_len=target.max_model_len,
        seed=config.seed,
    )
    if not config.speculative.forced_tokens:
        engine.guide.most_forced = 0
    return engine


def build_controller(
    config: EngineConfig, proposer: Proposer, target: ModelRunner, draft: ModelRunner | EagleRunner | None
) -> Controller:
    """Fixed lengths, or the controller that adapts them, seeded by a profile of the models."""
    speculative = config.speculative
    most = most_drafts(speculative)
    limits = FixedLength(most, proposer.max_draft_position)
    if not speculative.adaptive or most == 0:
        return limits
    most_tokens = config.scheduler.max_num_batched_tokens
    cost = _cost(target, most_tokens, speculative.profile_seconds)
    controller = AdaptiveLength(
        limits,
        replace(
            _sources(proposer),
            looks=speculative.acceptance == "coupled",
            deepest=min(most, DEFAULT_NUM_SPECULATIVE_TOKENS[speculative.method])
            if speculative.num_speculative_tokens is None
            else most,
        ),
        cost,
        _draft_cost(draft, cost, most_tokens, speculative.profile_seconds),
        most_tokens=most_tokens,
        most_rows=config.scheduler.max_num_seqs,
        trace=None if speculative.trace is None else TraceFile(speculative.trace),
    )
    if isinstance(proposer, HybridProposer):
        proposer.policy = controller
    return controller


def _sources(proposer: Proposer) -> Sources:
    """Which proposers cost nothing to ask, and which one runs a model."""
    if isinstance(proposer, HybridProposer):
        free = tuple(part.name for part in proposer.free)
        return replace(_sources(proposer.costly), free=free) if proposer.costly is not None else Sources(free=free)
    if isinstance(proposer, DraftModelProposer):
        return Sources(costly=proposer.name, lag=proposer.lag)
    if isinstance(proposer, EagleProposer):  # it keeps up by itself
        return Sources(costly=proposer.name)
    return Sources(free=(proposer.name,))


def _cost(runner: ModelRunner, most_tokens: int, limit_seconds: float) -> ForwardCost:
    found = profile(runner, most_tokens, limit_seconds)
    return ForwardCost(most_tokens) if found is None else ForwardCost(most_tokens, found.seconds, found.key)


HEAD_SHARE = 0.1
"""What a pass of a feature draft is taken to cost of the target's, until it has been seen."""


def _draft_cost(
    draft: ModelRunner | EagleRunner | None, target: ForwardCost, most_tokens: int, limit_seconds: float
) -> ForwardCost | None:
    if isinstance(draft, ModelRunner):
        return _cost(draft, most_tokens, limit_seconds)
    if draft is None:
        return None
    return ForwardCost(most_tokens, {n: HEAD_SHARE * target.at(n) for n in (1, 8, 32, 128)})


Draft = LoadedModel | EagleHead


def _draft_runner(draft: Draft | None, num_blocks: int, block_size: int) -> ModelRunner | EagleRunner | None:
    if isinstance(draft, EagleHead):
        return EagleRunner(draft, num_blocks, block_size)
    return ModelRunner(draft, num_blocks, block_size) if draft is not None else None


def _load_target(config: EngineConfig) -> LoadedModel:
    if config.cache.kv_cache_dtype == "auto":
        return load(config.target)
    target = load(config.target, packs_whole=False)
    if target.device.type == "cpu":
        logger.warning("kv_cache_dtype is 'fp8'; on a CPU plain PyTorch attends to such a cache, which is slower")
    return target


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


def _block_bytes(config: EngineConfig, target: LoadedModel, draft: Draft | None) -> tuple[int, int]:
    """Of one block: what the target's part takes, and the draft's."""
    size = config.cache.block_size
    dtype = kv_cache.FP8 if config.cache.kv_cache_dtype == "fp8" else target.dtype
    ours = kv_cache.bytes_per_token(target.attention.shapes, dtype) * size
    if isinstance(draft, EagleHead):
        return ours, eagle_runner.bytes_per_block(draft, size)
    return ours, 0 if draft is None else kv_cache.bytes_per_token(draft.attention.shapes, draft.dtype) * size


def _count_blocks(config: EngineConfig, target: LoadedModel, draft: Draft | None) -> int:
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    memory = cache.kv_cache_memory
    if memory is None:
        memory = kv_cache.free_memory(target.device, cache.gpu_memory_utilization)
    return kv_cache.count_blocks(memory, cache.block_size, sum(_block_bytes(config, target, draft)))


def _log_capacity(config: EngineConfig, num_blocks: int, target: LoadedModel, draft: Draft | None) -> None:
    size = config.cache.block_size
    ours, drafts = _block_bytes(config, target, draft)
    logger.info(
        "%d blocks of %d tokens: about %d tokens, %.1f requests of max_model_len %d; the draft takes %.0f %% of them",
        num_blocks, size, num_blocks * size, num_blocks * size / target.max_model_len, target.max_model_len,
        100 * drafts / (ours + drafts),
    )  # fmt: skip
