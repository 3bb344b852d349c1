"""The eagle proposer: its drafts are those of a from-scratch recompute, however the engine came to the same text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import specdec
from specdec.assembly import tell_kind
from specdec.batch import Drafts, Offer, Plan
from specdec.kernels import native
from specdec.llm import LLM, engine_config
from specdec.proposers.eagle import EagleProposer
from tests.drafts.eagle_oracle import Straight
from tests.drafts.eagle_toys import HEADS, KV_HEADS, fit, safeai_config, streams, target_model, tensors, write
from tests.engines import ids as run
from tests.engines import llm
from tests.toys import make_toy

LAYERS, DEPTH, TOKENS = (0, 2, 3), 3, 16
PROMPTS = [[7 * i % 251 for i in range(n)] for n in (33, 5, 18, 1)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_toy(tmp_path_factory.mktemp("eagle") / "target", initializer_range=0.12)


@pytest.fixture(scope="module")
def weights(target: str) -> dict[str, torch.Tensor]:
    """A head fitted to what the target says to the prompts: right about often enough for every branch to run."""
    made = tensors()
    texts = [
        p + a for p, a in zip(PROMPTS, run(llm(target, None), PROMPTS, max_tokens=TOKENS, ignore_eos=True), strict=True)
    ]
    fit(made, target, texts[:3], LAYERS, DEPTH)
    return made


@pytest.fixture(scope="module")
def head(weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> str:
    config = safeai_config(specdec={"feature_layer_ids": list(LAYERS), "feature_convention": "entry"})
    return write(tmp_path_factory.mktemp("eagle") / "head", config, weights)


@contextmanager
def offers_of(made: LLM) -> Iterator[list[tuple[list[int], Offer]]]:
    """Every offer with the text it was made behind."""
    proposer: Any = made.engine.proposer
    proposer = getattr(proposer, "costly", proposer)
    assert isinstance(proposer, EagleProposer)
    seen: list[tuple[list[int], Offer]] = []
    original = proposer.propose

    def spy(plan: Plan) -> Drafts:
        drafts = original(plan)
        seen.extend(
            (list(row.request.token_ids), offer) for row, offer in zip(plan, drafts, strict=True) if row.max_drafts
        )
        return drafts

    proposer.propose = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        proposer.propose = original  # type: ignore[method-assign]


def assert_recomputed(seen: list[tuple[list[int], Offer]], target: str, weights: dict[str, torch.Tensor]) -> int:
    """Each offer equals the straight-line rollout behind its text; returns how many were compared."""
    embedding = target_model(target).get_input_embeddings().weight.detach()
    oracle = Straight(weights, embedding, heads=HEADS, kv_heads=KV_HEADS, eps=1e-5, base=10000.0)
    compared = 0
    for text, offer in seen:
        if len(text) == 1:
            assert offer.token_ids == ()  # a single token has no feature before it
            continue
        assert offer.source == "eagle" and offer.token_ids
        drafts, shares, _ = oracle.rollout(text, streams(target, text[:-1], LAYERS), len(offer.token_ids))
        assert offer.token_ids == tuple(drafts)
        assert offer.confidences == pytest.approx(shares, abs=1e-5)
        compared += 1
    return compared


def accepted(made: LLM, prompts: list[list[int]], **params: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and accepted drafts by position, a prompt."""
    sampling = specdec.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **params)
    outputs = made.generate(prompts, sampling, progress=False)
    return [(o.outputs[0].token_ids, o.stats.accepted_per_pos) for o in outputs]


def test_drafts_equal_a_recompute_and_ids_equal_plain_decoding(
    target: str, head: str, weights: dict[str, torch.Tensor]
) -> None:
    made = llm(target, head, DEPTH)
    plain = run(llm(target, None), PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    with offers_of(made) as seen:
        assert run(made, PROMPTS, max_tokens=TOKENS, ignore_eos=True) == plain
    assert assert_recomputed(seen, target, weights) > 12
    assert {len(offer.token_ids) for _, offer in seen} >= {1, 2, 3}


@pytest.fixture(scope="module")
def cold(target: str, head: str) -> list[tuple[list[int], list[int]]]:
    """Each prompt alone, in one chunk, with nothing cached."""
    return [accepted(llm(target, head, DEPTH), [prompt])[0] for prompt in PROMPTS]


SCENES: dict[str, dict[str, Any]] = {
    "chunked prompts": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "blocks of one": {"block_size": 1, "num_kv_blocks": 400},
}


@pytest.mark.parametrize("scene", SCENES)
def test_acceptance_does_not_depend_on_how_the_text_was_computed(
    scene: str, target: str, head: str, cold: list[Any]
) -> None:
    assert sum(sum(per_position) for _, per_position in cold) > 6  # else equality would say little
    made = llm(target, head, DEPTH, **SCENES[scene])
    assert [accepted(made, [prompt])[0] for prompt in PROMPTS] == cold


def test_drafts_behind_a_preemption_equal_a_recompute(target: str, head: str, weights: dict[str, torch.Tensor]) -> None:
    """Where the text is cut into steps differs; what is drafted behind it does not, nor what comes out."""
    made = llm(target, head, DEPTH, block_size=4, num_kv_blocks=24)
    plain = run(llm(target, None), PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    with offers_of(made) as seen:
        assert run(made, PROMPTS, max_tokens=TOKENS, ignore_eos=True) == plain
    assert made.engine.scheduler.num_preemptions
    assert assert_recomputed(seen, target, weights) > 6


def test_acceptance_is_the_same_behind_a_prefix_hit(target: str, head: str, weights: dict[str, torch.Tensor]) -> None:
    """A block-aligned hit too, and one whose blocks were first computed for another continuation."""
    made = llm(target, head, DEPTH, block_size=4)
    long = PROMPTS[0]
    cold = [accepted(llm(target, head, DEPTH, block_size=4), [p])[0] for p in (long, [*long[:17], 3, 1, 4, 1, 5])]
    made = llm(target, head, DEPTH, block_size=4)
    accepted(made, [[*long, 9, 9]])
    hits = made.engine.scheduler.pool.num_hit_tokens
    with offers_of(made) as seen:
        warm = [accepted(made, [p])[0] for p in (long, [*long[:17], 3, 1, 4, 1, 5])]
    assert made.engine.scheduler.pool.num_hit_tokens - hits >= 32 + 16
    assert warm == cold
    assert_recomputed(seen, target, weights)


def test_a_request_that_never_drafts_leaves_complete_blocks(
    target: str, head: str, weights: dict[str, torch.Tensor]
) -> None:
    """Speculation off for one request, on for the next of the same prompt: the hit is as good as computed."""
    made = llm(target, head, DEPTH, block_size=4)
    accepted(made, [PROMPTS[0]], speculative={"enabled": False})
    with offers_of(made) as seen:
        accepted(made, [PROMPTS[0]])
    assert assert_recomputed(seen, target, weights) > 4


def test_a_pause_leaves_no_hole(target: str, head: str, weights: dict[str, torch.Tensor]) -> None:
    """Zero-draft steps in between, as a controller under load would make them."""
    made = llm(target, head, DEPTH)
    controller = made.engine.controller
    original, steps = controller.budget, iter(range(10**6))
    controller.budget = lambda request: original(request) if next(steps) // 5 % 2 else 0  # type: ignore[method-assign]
    try:
        with offers_of(made) as seen:
            run(made, PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    finally:
        controller.budget = original  # type: ignore[method-assign]
    assert assert_recomputed(seen, target, weights) > 6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {65: 4.0}},
    ],
)
def test_sampled_ids_equal_plain_sampling_and_the_noise_is_shared(
    target: str, head: str, params: dict[str, Any]
) -> None:
    """With the target's noise the head agrees far more often than by chance (1 in 120 for blind guesses)."""
    made = llm(target, head, DEPTH)
    plain = run(llm(target, None), PROMPTS, max_tokens=TOKENS, ignore_eos=True, **params)
    assert run(made, PROMPTS, max_tokens=TOKENS, ignore_eos=True, **params) == plain


def test_judged_by_rejection_drafts_are_certain(target: str, head: str, weights: dict[str, torch.Tensor]) -> None:
    """Rows that sample get the likeliest tokens: drafts drawn by the target's noise would use that noise twice."""
    rejection = specdec.SpeculativeConfig(acceptance="rejection", num_speculative_tokens=DEPTH)
    made = LLM(target, head, speculative=rejection, dtype="float64", num_kv_blocks=256)
    with offers_of(made) as seen:
        run(made, PROMPTS[:2], max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=4)
    assert assert_recomputed(seen, target, weights) > 6


def test_a_mixed_batch_equals_each_request_alone(target: str, head: str) -> None:
    made = llm(target, head, DEPTH)
    params = [
        specdec.SamplingParams(temperature=t, seed=3, max_tokens=TOKENS, ignore_eos=True) for t in (0.0, 0.9, 0.0, 0.7)
    ]
    together = made.generate(PROMPTS, params, progress=False)
    for prompt, own, output in zip(PROMPTS, params, together, strict=True):
        alone = llm(target, head, DEPTH).generate([prompt], own, progress=False)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.stats.accepted_per_pos == output.stats.accepted_per_pos


def test_blocks_without_pairs_stop_drafts_but_not_the_request(target: str, head: str) -> None:
    made = llm(target, head, DEPTH, block_size=4)
    plain = accepted(made, [PROMPTS[0]])
    made.engine.scheduler.pool.draft_ready = [0] * 256  # as if another proposer had filled the cache
    token_ids, per_position = accepted(made, [PROMPTS[0]])[0]
    assert token_ids == plain[0][0] and per_position == []
    made.engine.scheduler.pool.clear_cache()
    assert accepted(made, [PROMPTS[0]]) == plain


@pytest.mark.skipif(not native.enabled(), reason="no native kernels here")
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.95), ("bfloat16", 0.6)])
def test_native_code_drafts_as_well_as_the_twin(
    target: str, head: str, cold: list[Any], dtype: str, least: float
) -> None:
    """Several drafts in one call, 8-bit codes in bfloat16: rounding may cost a little acceptance, never the ids."""

    def count(found: list[tuple[list[int], list[int]]]) -> int:
        return sum(sum(per_position) for _, per_position in found)

    found = accepted(llm(target, head, DEPTH, dtype=dtype), PROMPTS)
    assert [own for own, _ in found] == run(llm(target, None, dtype=dtype), PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    assert count(found) >= least * count(cold)


def test_a_hybrid_keeps_the_head_up_to_date_on_others_drafts(
    target: str, head: str, weights: dict[str, torch.Tensor]
) -> None:
    """Where lookup's drafts were verified, the head's next ones equal a recompute all the same."""
    hybrid = specdec.SpeculativeConfig(method="hybrid", draft=head, num_speculative_tokens=DEPTH)
    made = LLM(target, head, speculative=hybrid, dtype="float64", num_kv_blocks=256)
    prompts = [(PROMPTS[0][:9] * 4)[:n] for n in (33, 20)]
    plain = run(llm(target, None), prompts, max_tokens=TOKENS, ignore_eos=True)
    sources: set[str] = set()
    with offers_of(made) as seen:
        emitted = made.engine.scheduler.commit
        made.engine.scheduler.commit = lambda batch, verdict: (  # type: ignore[method-assign]
            sources.update(row.source for row in batch) or emitted(batch, verdict)
        )
        assert run(made, prompts, max_tokens=TOKENS, ignore_eos=True) == plain
    assert len(sources - {"", "eagle"}) >= 1 and "eagle" in sources
    assert assert_recomputed([pair for pair in seen if pair[1].token_ids], target, weights) > 3


def test_method_and_directory_say_the_same(target: str, head: str) -> None:
    own = specdec.SpeculativeConfig(method="eagle", draft=head)
    for config in (engine_config(target, head), engine_config(target, head, own)):
        assert tell_kind(config.speculative).method == "eagle"
    assert tell_kind(engine_config(target, target).speculative).method == "draft_model"
    with pytest.raises(ValueError, match="'eagle' needs draft="):
        specdec.SpeculativeConfig(method="eagle")
