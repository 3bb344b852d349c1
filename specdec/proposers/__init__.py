"""Proposers: every way of guessing, and the one place that knows them by name."""

from __future__ import annotations

from specdec.block_pool import BlockPool
from specdec.config import SchedulerConfig, SpeculativeConfig
from specdec.models.eagle_runner import EagleRunner
from specdec.models.runner import ModelRunner
from specdec.proposers.base import MostExpected, NoDrafts, OfferPolicy, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.eagle import EagleProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.past_outputs import PastOutputs
from specdec.proposers.suffix import SuffixProposer

DEFAULT_NUM_SPECULATIVE_TOKENS = {"none": 0, "ngram": 5, "suffix": 5, "draft_model": 4, "eagle": 5, "hybrid": 5}
"""Most drafts a row and step, of fixed lengths and of whatever runs a model."""

LONGEST_LOOKUP = {"ngram": 16, "suffix": 16, "hybrid": 16}
"""Most drafts where a controller judges every offer: a lookup's cost nothing to make, and text that repeats itself
takes more than five at once."""


def most_drafts(config: SpeculativeConfig) -> int:
    """Most drafts a row and step, by what was said or by the method (which is no longer "auto")."""
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    most = DEFAULT_NUM_SPECULATIVE_TOKENS[config.method]
    return LONGEST_LOOKUP.get(config.method, most) if config.adaptive else most


def build_proposer(
    config: SpeculativeConfig,
    scheduler: SchedulerConfig,
    pool: BlockPool,
    target: ModelRunner,
    draft: ModelRunner | EagleRunner | None,
    policy: OfferPolicy | None = None,
) -> Proposer:
    """The proposer a resolved config asks for (its method is no longer "auto").

    policy   decides between the parts of a hybrid; None: by the confidences of the offers
    """
    costly = _build_costly(config, scheduler, pool, target, draft)
    if config.method == "hybrid":
        return HybridProposer((_ngram(config), _suffix(config)), costly, policy or MostExpected())
    if config.method == "ngram":
        return _ngram(config)
    if config.method == "suffix":
        return _suffix(config)
    if config.method in ("draft_model", "eagle"):
        assert costly is not None
        return costly
    return NoDrafts()


def _ngram(config: SpeculativeConfig) -> NgramProposer:
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix(config: SpeculativeConfig) -> SuffixProposer:
    store = PastOutputs(config.suffix_store_tokens) if config.suffix_store_tokens else None
    return SuffixProposer(config.prompt_lookup_min, store)


def _build_costly(
    config: SpeculativeConfig,
    scheduler: SchedulerConfig,
    pool: BlockPool,
    target: ModelRunner,
    draft: ModelRunner | EagleRunner | None,
) -> Proposer | None:
    """The proposer that runs a model or a head, where there is one."""
    if draft is None:
        return None
    if isinstance(draft, EagleRunner):
        return EagleProposer(draft, target, pool, shares_noise=config.acceptance == "coupled")
    return DraftModelProposer(
        draft,
        pool,
        vocab_size=target.model.vocab_size,
        max_catch_up=scheduler.max_num_batched_tokens,
        tells_laws=config.acceptance == "rejection",
    )
