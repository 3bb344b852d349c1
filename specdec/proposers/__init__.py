"""Proposers: every way of guessing, and the one place that knows them by name."""

from __future__ import annotations

from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig, SpeculativeConfig
from specdec.models.runner import ModelRunner
from specdec.proposers.base import NoDrafts, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.ngram import NgramProposer

DEFAULT_NUM_SPECULATIVE_TOKENS = {"none": 0, "ngram": 5, "draft_model": 4}


def build_proposer(
    config: SpeculativeConfig,
    scheduler: SchedulerConfig,
    pool: BlockPool,
    target: ModelRunner,
    draft: ModelRunner | None,
) -> Proposer:
    """The proposer a resolved config asks for (its method is no longer "auto")."""
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "draft_model":
        assert draft is not None
        return DraftModelProposer(
            draft,
            pool,
            vocab_size=target.model.vocab_size,
            max_catch_up=scheduler.max_num_batched_tokens,
            tells_laws=config.acceptance == "rejection",
        )
    return NoDrafts()
