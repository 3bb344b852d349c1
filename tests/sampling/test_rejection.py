"""Rejection sampling: the target's law comes out whatever was drawn from whatever law, and lies are caught.

12,288 outputs of 3 tokens over a vocabulary of 8 a case. A right sampler fails a case with probability one in
a million (see `bound`), and the seeds are fixed besides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.batch import Batch, Drafts, Offer, Row
from specdec.config import SpeculativeConfig
from specdec.engine import Engine
from specdec.errors import InvalidRequestError
from specdec.kernels.accept import DRAFT_POSITIONS, reference
from specdec.llm import LLM
from specdec.proposers.draft_model import DraftModelProposer
from specdec.sampling import verify
from specdec.sampling_params import SamplingParams
from specdec.server.flags import parse_config, parse_flags
from tests.engines import assert_clean, ids, llm
from tests.sampling.by_hand import bound, chi_square, outputs
from tests.sampling.table_model import Digits, TableModel, known, run, table_engine

NUM_DRAWS = 12_288
PROMPT = [3, 1, 4]
TARGET = TableModel.random(0, eos=frozenset({6}), tokenizer=Digits())
PROPOSERS = {"good": TARGET.near(1, 0.4), "bad": TableModel.random(2), "self": TARGET}
CASES: list[tuple[dict[str, Any], int, str]] = [
    ({"min_tokens": 2, "repetition_penalty": 1.5, "top_k": 6, "temperature": 1.3}, 3, "good"),
]
MORE: list[tuple[dict[str, Any], int, str]] = [
    ({}, 1, "bad"),
    ({"presence_penalty": 0.8, "bad_words": [[2], [3, 3]], "top_p": 0.9}, 5, "bad"),
    ({"min_p": 0.2}, 3, "good"),
    ({"repetition_penalty": 0.6}, 1, "bad"),
    ({"presence_penalty": -2.0}, 5, "good"),
    ({"frequency_penalty": 2.0}, 3, "bad"),
    ({"logit_bias": {0: 2.0, 5: -100.0}}, 3, "self"),
    ({"allowed_token_ids": [0, 2, 3, 7]}, 5, "good"),
    ({"top_p": 0.7}, 1, "bad"),
    ({"top_k": 3, "temperature": 0.7}, 5, "bad"),
    ({"min_tokens": 2}, 5, "bad"),
]


def _engine(k: int, proposer: str, **options: Any) -> Engine:
    return table_engine(TARGET, k, PROPOSERS[proposer], tells_laws=True, **options)


def _statistic(engine: Engine, params: dict[str, Any], count: int = NUM_DRAWS) -> tuple[float, float]:
    """Chi-square of whole outputs against enumeration, and its bound."""
    own = {**params, "bad_words": ["".join(map(str, w)) for w in params.get("bad_words", ())]}
    requests = run(engine, [PROMPT] * count, [SamplingParams(max_tokens=3, **own)] * count)
    expected = outputs(TARGET.scores, PROMPT, params, 3, stop_ids=[6])
    statistic, freedom = chi_square([tuple(r.output_token_ids) for r in requests], expected)
    return statistic, bound(freedom)


def _name(value: object) -> str:
    return "+".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("params", "k", "proposer"), CASES, ids=_name)
def test_outputs_follow_the_law(params: dict[str, Any], k: int, proposer: str) -> None:
    statistic, most = _statistic(_engine(k, proposer), params)
    assert statistic < most


@pytest.mark.slow
@pytest.mark.parametrize(("params", "k", "proposer"), MORE, ids=_name)
def test_outputs_follow_the_law_in_more_cases(params: dict[str, Any], k: int, proposer: str) -> None:
    """`make test-slow`."""
    statistic, most = _statistic(_engine(k, proposer), params)
    assert statistic < most


class Liar(DraftModelProposer):
    """Says it drew from a flat law, whatever it drew from."""

    def _offer(self, request_id: str) -> Offer:
        offer = super()._offer(request_id)
        return offer if offer.laws is None else replace(offer, laws=torch.full_like(offer.laws, 1 / 8))


def test_a_draft_that_lies_about_its_law_is_caught() -> None:
    """Negative control; under coupling the same lie would change nothing."""
    engine = _engine(3, "bad")
    honest = engine.proposer
    assert isinstance(honest, DraftModelProposer)
    engine.proposer = Liar(honest.runner, honest.pool, vocab_size=8, max_catch_up=2**16, tells_laws=True)
    statistic, most = _statistic(engine, {}, 4096)
    assert statistic > 2 * most


def test_a_sampler_whose_noise_depends_on_the_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: coins are made of the noise that drew the draft."""
    honest = reference.bits

    def bits(seeds: Tensor, positions: Tensor, vocab_size: int, stream: int = 0) -> Tensor:
        if stream != reference.COIN_STREAM:
            return honest(seeds, positions, vocab_size, stream)
        return honest(seeds, positions + DRAFT_POSITIONS, 8).amax(1, keepdim=True)

    monkeypatch.setattr(reference, "bits", bits)
    statistic, most = _statistic(_engine(3, "bad"), {}, 4096)
    assert statistic > 2 * most


def test_an_equal_draft_is_always_accepted_and_rejection_accepts_more_than_coupling() -> None:
    own = [SamplingParams(max_tokens=40, ignore_eos=True)] * 32
    rates = {}
    for name in PROPOSERS:
        for tells_laws in (False, True):
            engine = table_engine(TARGET, 4, PROPOSERS[name], tells_laws=tells_laws)
            requests = run(engine, [PROMPT] * 32, own)
            accepted = sum(r.stats.num_accepted_tokens for r in requests)
            rates[name, tells_laws] = accepted / sum(r.stats.num_draft_tokens for r in requests)
    assert rates["self", True] == rates["self", False] == 1.0
    assert rates["good", True] > rates["good", False] and rates["bad", True] > rates["bad", False]


def test_a_seed_is_kept_in_any_batch_of_the_same_lengths_and_greedy_rows_are_plain() -> None:
    sets = [SamplingParams(seed=7 + i, max_tokens=20, temperature=t) for i, t in enumerate((1.0, 0.0, 0.8))]
    prompts = [[1, 2, 3], [4], [5, 6]]
    together = [r.output_token_ids for r in run(_engine(3, "good"), prompts, sets)]
    alone = [run(_engine(3, "good"), [p], [s])[0].output_token_ids for p, s in zip(prompts, sets, strict=True)]
    assert together == alone
    assert together[1] == run(table_engine(TARGET), [[4]], [sets[1]])[0].output_token_ids


def test_certain_drafts_are_judged_as_by_coupling() -> None:
    """Lookup tells no laws: comparing with the target's own draw has the same law and acceptance."""
    own = [SamplingParams(seed=3, max_tokens=20)]
    plain = run(table_engine(TARGET), [PROMPT], own)[0].output_token_ids
    assert run(table_engine(TARGET, 3, known({3: plain}, 8)), [PROMPT], own)[0].output_token_ids == plain


def test_a_draft_that_was_cut_counts_as_rejected() -> None:
    """One law more than drafts: the token behind comes from the residual, which the cut draft's law left."""
    logits = torch.zeros(1, 4, dtype=torch.float64)
    law = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    seen = set()
    for seed in range(50):
        request = _engine(1, "good").make_request("r", [1], SamplingParams(seed=seed))
        request.num_computed_tokens = 0
        row = Row(request, 0, 1, 1)
        seen.add(verify(Batch((row,)), logits, Drafts((Offer(laws=law),))).token_ids[0])
        cut = verify(Batch((row,)), logits, Drafts((Offer((0,), "d", laws=law),)))  # not admitted: its law is forgotten
        assert cut == verify(Batch((row,)), logits)
    assert seen == {(2,), (3,)}


def test_drafts_beyond_the_laws_are_certain() -> None:
    """What a grammar forces rides behind what was drawn: kept where the target is certain too, else replaced."""
    logits = torch.full((3, 4), -float("inf"), dtype=torch.float64)
    logits[0] = logits[1, 2] = logits[2, 1] = 0
    law = torch.full((1, 4), 0.25, dtype=torch.float64)
    for seed in range(20):
        request = _engine(1, "good").make_request("r", [1], SamplingParams(seed=seed))
        for drafts, kept in (((1, 2), (1, 2, 1)), ((1, 3), (1, 2))):
            offers = Drafts((Offer(drafts, "d", laws=law),))
            assert verify(Batch((Row(request, 0, 1, 2, drafts),)), logits, offers).token_ids[0] == kept


def test_preemption_and_a_grammar_stand_beside_rejection(toy: str, toy_draft: str) -> None:
    config = SpeculativeConfig(num_speculative_tokens=3, acceptance="rejection", adaptive=False)
    made = LLM(toy, toy_draft, speculative=config, dtype="float64", block_size=4, num_kv_blocks=14,
               max_num_batched_tokens=16, max_num_seqs=4)  # fmt: skip
    own = SamplingParams(max_tokens=24, seed=5, structured_outputs={"regex": "[abc]{20}"}, logprobs=1)
    got = made.generate([[1, 2, 3]] * 4, own, progress=False)
    assert_clean(made)
    for output in got:
        choice = output.outputs[0]
        assert len(choice.text) == 20 and set(choice.text) <= set("abc") and choice.finish_reason == "stop"
        assert [v.token_id for v in choice.logprobs or []] == choice.token_ids
    assert made.engine.scheduler.num_preemptions > 0
    greedy: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    assert ids(made, [[1, 2, 3]], **greedy) == ids(llm(toy), [[1, 2, 3]], **greedy)


def test_another_acceptance_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="acceptance is 'typical'; it must be one of coupled, rejection"):
        SpeculativeConfig(acceptance="typical")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="picks an offer after it is drawn"):
        SpeculativeConfig(acceptance="rejection", method="hybrid", draft="other")


def test_the_command_line_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft that ships for the target too: a hybrid would pick after the draw, so the draft goes alone."""
    for shipped in (None, "shipped"):
        monkeypatch.setattr("specdec.assembly.shipped_draft", lambda target, shipped=shipped: shipped)
        speculative = parse_config(parse_flags(["--speculative-config", '{"acceptance": "rejection"}'], {})).speculative
        assert speculative.acceptance == "rejection" and speculative.draft == shipped
