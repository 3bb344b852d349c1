"""Hybrid: whoever makes the offer, the ids are the target's; and a model that was not asked loses nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.assembly import resolve_draft
from specdec.batch import NO_OFFER, Offer, Row
from specdec.llm import LLM
from specdec.proposers.base import MostExpected, expected_accepted
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.shipped import shipped_draft
from specdec.scheduler import Emitted
from specdec.server.options import ServerOptions
from tests.engines import Oracle, assert_clean, ids, llm, proposing
from tests.server.support import run, serving

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9] * 20, list(range(60)), [1, 2, 3, 4] * 9]


class Chance:
    """Takes any offer and asks the model now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def choose(self, row: Row, offers: Sequence[Offer]) -> int:
        return self.rng.randrange(len(offers))

    def model_depths(self, rows: Sequence[Row], free: Sequence[Offer]) -> list[int]:
        return [self.rng.choice([0, 0, 0, 1, 5, 99]) for _ in rows]


def _drive(made: LLM, prompts: list[list[int]], **params: Any) -> list[Emitted]:
    """Every gain of the prompts, with the leak check."""
    engine, gains = made.engine, []
    for i, prompt in enumerate(prompts):
        engine.add(engine.make_request(f"r{i}", prompt, specdec.SamplingParams(temperature=0, **params)))
    while engine.has_work:
        gains += engine.step()
    assert_clean(made)
    return gains


@contextmanager
def _hybrid(made: LLM, free: Sequence[Any], policy: Any, k: int = 4) -> Iterator[LLM]:
    """An engine with a draft model, whose proposer becomes the costly part of a hybrid."""
    with proposing(made, HybridProposer(free, made.engine.proposer, policy), k):
        yield made


@pytest.fixture
def answers(toy: str) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): a for p, a in zip(PROMPTS, ids(llm(toy), PROMPTS, max_tokens=40, ignore_eos=True))}


@pytest.mark.parametrize("draft", ["suffix", "hybrid"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}])
def test_ids_are_those_of_plain_decoding(toy: str, draft: str, sampling: dict[str, Any]) -> None:
    params = {"max_tokens": 20, "ignore_eos": True, **sampling}
    plain = ids(llm(toy), PROMPTS, **params)
    assert ids(llm(toy, draft, 4), PROMPTS, **params) == plain
    tight = llm(toy, draft, 4, num_kv_blocks=12, max_num_batched_tokens=16, max_num_seqs=4)  # chunks and preemption
    assert ids(tight, PROMPTS, **params) == plain


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
def test_ids_hold_with_models_in_the_mix(toy: str, toy_draft: str, sampling: dict[str, Any]) -> None:
    params = {"max_tokens": 20, "ignore_eos": True, **sampling}
    plain = ids(llm(toy), PROMPTS, **params)
    for draft in (toy, toy_draft):
        free = llm(toy, "hybrid", 4).engine.proposer.free
        with _hybrid(llm(toy, draft, 4), free, Chance(0)) as made:
            assert ids(made, PROMPTS, **params) == plain


CACHES = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "preempted": {"num_kv_blocks": 14, "block_size": 8, "max_num_seqs": 4},
}


@pytest.mark.parametrize("cache", CACHES)
def test_a_model_that_was_passed_over_still_drafts_as_well(
    toy: str, answers: dict[tuple[int, ...], list[int]], cache: str
) -> None:
    """A self-draft is always right; wrong tokens of another proposer must not stay in its cache."""
    for free in (Oracle(answers, wrong=True), Oracle(answers)):
        with _hybrid(llm(toy, toy, 4, **CACHES[cache]), [free], Chance(1)) as made:
            for _ in range(2):  # the second time the prompts hit the prefix cache
                gains = _drive(made, PROMPTS, max_tokens=40, ignore_eos=True)
                own = [g for g in gains if g.source == "draft_model"]
                assert own and all(g.num_accepted == g.num_drafted for g in own)
                assert any(g.source == "oracle" for g in gains)


def test_free_offers_save_the_models_passes(toy: str, answers: dict[tuple[int, ...], list[int]]) -> None:
    class Never(Chance):
        def model_depths(self, rows: Sequence[Row], free: Sequence[Offer]) -> list[int]:
            return [0] * len(rows)

    with _hybrid(llm(toy, toy, 4), [Oracle(answers)], Never(0)) as made:
        runner, calls = made.engine.proposer.costly.runner, []  # type: ignore[attr-defined]
        forward = runner.forward
        runner.forward = lambda batch: calls.append(1) or forward(batch)
        try:
            gains = _drive(made, PROMPTS[:1], max_tokens=40, ignore_eos=True)
        finally:
            del runner.forward
    assert len(gains) == 9  # 40 = 1 + 7 * 5 + 4, the prompt's own step among them
    assert len(calls) <= 3  # one pass for every sixteen tokens, not one a step


@pytest.mark.parametrize("wrong", [False, True])
def test_both_ends_are_pinned(toy: str, answers: dict[tuple[int, ...], list[int]], wrong: bool) -> None:
    """Always right: k + 1 tokens a step, always wrong: one; the same as without a hybrid around it."""
    made = llm(toy)
    with proposing(made, HybridProposer([Oracle(answers, wrong=wrong)], None, MostExpected()), 4):
        gains = _drive(made, PROMPTS, max_tokens=36, ignore_eos=True)  # 1 of the prompt's step, then 7 times 5
    lengths = {len(g.token_ids) for g in gains if g.num_drafted == 4}
    assert lengths == ({1} if wrong else {5})


@pytest.mark.parametrize("draft", ["suffix", "hybrid"])
def test_acceptance_is_the_same_cold_hit_and_chunked(toy: str, draft: str) -> None:
    """Past outputs hold the greedy answer already, so nearly every draft is right, whatever the cache holds."""
    config = specdec.SpeculativeConfig(num_speculative_tokens=4, suffix_store_tokens=10_000, adaptive=False)
    options = {"speculative": config, "dtype": "float64", "num_kv_blocks": 64}

    def lengths(made: LLM) -> list[tuple[int, ...]]:
        gains = _drive(made, PROMPTS[2:], max_tokens=20, ignore_eos=True)
        return sorted(tuple(len(g.token_ids) for g in gains if g.request.request_id == f"r{i}") for i in range(2))

    made = LLM(toy, draft, **options)
    lengths(made)
    made.engine.scheduler.pool.clear_cache()
    cold = lengths(made)
    assert lengths(made) == cold and made.engine.scheduler.pool.num_hit_tokens > 0
    chunked = LLM(toy, draft, max_num_batched_tokens=16, max_num_seqs=2, **options)
    lengths(chunked)
    chunked.engine.scheduler.pool.clear_cache()
    assert [tuple(n for n in row if n) for row in lengths(chunked)] == cold
    assert all(max(row) == 5 and len(row) <= 6 for row in cold)


def test_the_policy_without_a_controller_takes_what_promises_most() -> None:
    sure, unsure = Offer((1, 2), "a", (0.9, 0.9)), Offer((1, 2, 3, 4), "b", (0.3, 0.9, 0.9, 0.9))
    row = Row(specdec.request.Request("r", [1], specdec.SamplingParams()), 0, 1, 4)
    assert MostExpected().choose(row, [unsure, sure]) == 1
    assert MostExpected().choose(row, [sure, sure]) == 0
    assert MostExpected().model_depths([row, row], [sure, NO_OFFER]) == [0, 4]
    assert expected_accepted(sure) == pytest.approx(1.71)


def test_draft_strings() -> None:
    def resolved(draft: str | None, **config: Any) -> tuple[str, str | None]:
        made = resolve_draft(draft, specdec.SpeculativeConfig(**config), "some/target")
        return made.method, made.draft

    assert resolved("auto") == resolved("hybrid") == ("hybrid", None)
    assert resolved("suffix") == ("suffix", None)
    assert resolved("ngram") == ("ngram", None)
    assert resolved(None) == resolved("suffix", num_speculative_tokens=0) == ("none", None)
    assert resolved("a/model") == ("draft_model", "a/model")
    assert resolved("a/model", method="hybrid") == ("hybrid", "a/model")
    with pytest.raises(ValueError, match="say it once"):
        resolved("suffix", method="hybrid")


def test_a_shipped_draft_is_found_by_the_targets_name(tmp_path: Path) -> None:
    (tmp_path / "small-1b").mkdir()
    assert shipped_draft("Lab/Small-1B", (tmp_path,)) is None  # a directory without a config is no draft
    (tmp_path / "small-1b" / "config.json").write_text("{}")
    assert shipped_draft("Lab/Small-1B", (tmp_path,)) == tmp_path / "small-1b"
    assert shipped_draft("small-1b", (tmp_path,)) == tmp_path / "small-1b"
    assert shipped_draft("other", (tmp_path,)) is None and shipped_draft("/", (tmp_path,)) is None


def test_the_server_keeps_the_past_outputs_of_its_keys_apart(toy: str) -> None:
    config = specdec.SpeculativeConfig(num_speculative_tokens=2, suffix_store_tokens=5000, adaptive=False)
    made = LLM(toy, "suffix", speculative=config, dtype="float64", num_kv_blocks=16)

    async def ask() -> None:
        async with serving(made.engine, ServerOptions(api_keys=("one", "two"))) as client:
            for key in ("one", "two"):
                body = {"prompt": [1, 2, 3], "max_tokens": 2, "cache_salt": "s"}
                reply = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == 200, reply.text

    run(ask())
    store = made.engine.proposer.store  # type: ignore[attr-defined]
    assert [len(store.parts((owner, "s"))) for owner in ("key 0", "key 1", None)] == [1, 1, 0]
