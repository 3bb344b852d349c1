"""The same tokens as plain decoding, whatever is asked, proposed, batched or squeezed; float64, no exception."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.errors import InvalidRequestError
from specdec.request import Request
from specdec.sampling import Choice, choose
from specdec.sampling.filters import Limits, keep
from specdec.sampling.processors import edit
from specdec.sampling_params import SamplingParams
from specdec.vocabulary import bad_word_ids
from tests.engines import ids, llm
from tests.sampling.by_hand import law
from tests.sampling.table_model import Digits, TableModel, known, run, table_engine

VOCAB_SIZE = 10
TARGET = TableModel.random(5, VOCAB_SIZE, scale=1.5, eos=frozenset({9}), tokenizer=Digits())
GOOD, BAD = TARGET.near(6, 0.4), TableModel.random(7, VOCAB_SIZE)
PROMPTS = [[1, 2, 3], [4], [0, 0, 5, 6, 7, 8, 2, 2, 1]]

_ids = st.integers(0, VOCAB_SIZE - 1)
_penalty = st.sampled_from([-2.0, -0.7, 0.0, 0.5, 2.0])
PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-6, 1e-5, 1e-3, 0.3, 0.8, 1.0, 1.5])},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 2**40]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "presence_penalty": _penalty,
        "frequency_penalty": _penalty,
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.2, 3.0]),
        "logit_bias": st.dictionaries(_ids, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
        "allowed_token_ids": st.lists(_ids, min_size=4, max_size=8, unique=True),
        "bad_words": st.lists(st.sampled_from(["1", "22", "345", "30"]), max_size=3),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.just(8), max_size=1),
        "ignore_eos": st.booleans(),
    },
)


def _run(k: int, proposer: Any, params: list[SamplingParams], **options: Any) -> list[list[int]]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    return [r.output_token_ids for r in run(table_engine(TARGET, k, proposer, **options), prompts, params)]


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(PARAMS, min_size=3, max_size=3), st.integers(0, 2**63 - 1))
def test_every_parameter_set_decodes_as_it_does_plainly(sets: list[dict[str, Any]], seed: int) -> None:
    params = [SamplingParams(max_tokens=14, seed=max(seed - i, 0), **own) for i, own in enumerate(sets)]
    plain = _run(0, None, params)
    answers = {own.seed or 0: ids for own, ids in zip(params, plain, strict=True)}
    right, wrong = known(answers, VOCAB_SIZE), known(answers, VOCAB_SIZE, wrong=True)
    pairs: list[tuple[int, Any]] = [(1, GOOD), (4, GOOD), (8, GOOD), (4, BAD), (1, right), (8, right), (4, wrong)]
    for k, proposer in pairs:
        assert _run(k, proposer, params) == plain
    assert _run(4, GOOD, params, num_blocks=12, rows=3, budget=16) == plain  # preempts


EIGHT: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_p": 0.1},
    {"min_p": 0.9},
    {"repetition_penalty": 1.4, "presence_penalty": 1.0},
    {"logit_bias": {3: 4}, "bad_words": ["33"], "temperature": 1.4},
    {"temperature": 0, "frequency_penalty": 0.6, "min_tokens": 10},
    {"allowed_token_ids": [2, 4, 6, 9], "logprobs": 3},
]


@pytest.mark.parametrize("k", [0, 4])
def test_eight_requests_in_one_batch_equal_their_runs_alone(k: int) -> None:
    params = [SamplingParams(max_tokens=24, seed=100 + i, **own) for i, own in enumerate(EIGHT)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    together = [r.output_token_ids for r in run(table_engine(TARGET, k, GOOD), prompts, params)]
    alone = [
        run(table_engine(TARGET, k, GOOD), [prompt], [own])[0].output_token_ids
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert together == alone == _run(0, None, params)


@pytest.mark.parametrize("tells_laws", [False, True])
def test_a_request_that_comes_to_a_dead_end_keeps_what_it_said_before(tells_laws: bool) -> None:
    """Behind three tokens every allowed one is a bad word; inside an accepted run that is the same end."""
    words = ["".join(word) for word in itertools.product("12", repeat=4)]
    own: dict[str, Any] = {"allowed_token_ids": [1, 2], "bad_words": words, "temperature": 0, "logprobs": 1}
    own |= {"max_tokens": 9, "ignore_eos": True, "frequency_penalty": 2.0}

    def end(k: int, **more: Any) -> tuple[Any, ...]:
        engine = table_engine(TARGET, k, TARGET, tells_laws=tells_laws)
        request = engine.make_request("r", PROMPTS[0], SamplingParams(**{**own, **more}))
        engine.add(request)
        while engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()
        assert request.stats.num_emitted == len(request.logprobs) == request.num_output_tokens
        assert request.stats.num_accepted_tokens <= request.stats.num_draft_tokens
        return request.output_token_ids, request.finish_reason, request.error

    plain = end(0)
    assert len(plain[0]) == 3 and plain[1].value == "error"
    assert plain[2] is not None and "bad_words and min_tokens rule out all of allowed_token_ids" in plain[2]
    assert [end(k) for k in (1, 2, 4, 8)] == [plain] * 4
    assert plain[0][1] != plain[0][0]
    stopped = [end(k, stop_token_ids=[plain[0][1]]) for k in (0, 1, 2, 4, 8)]  # before the dead end: no error then
    assert [(ids, reason.value, error) for ids, reason, error in stopped] == [(plain[0][:2], "stop", None)] * 5


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_rejected_drafts_leave_no_trace_in_the_counts(name: str) -> None:
    """Many drafts are wrong; the counts equal those of the output, and both signs of the penalty act."""
    texts = []
    for value in (-2.0, 2.0):
        params = [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, **{name: value})] * 3
        requests = run(table_engine(TARGET, 5, BAD), PROMPTS, params)
        stats = requests[0].stats
        assert stats.num_draft_tokens - stats.num_accepted_tokens > 15
        for request in requests:
            assert request.counts is not None
            token_ids, counts = request.counts.with_drafts(())
            output = request.output_token_ids
            assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == {t: output.count(t) for t in output}
        texts.append([r.output_token_ids for r in requests])
        assert texts[-1] == _run(0, None, params)
    assert texts[0] != texts[1]


def test_preemption_keeps_penalties_and_noise() -> None:
    params = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, frequency_penalty=0.7) for i in range(6)]
    prompts = [PROMPTS[i % 3] for i in range(6)]
    engine = table_engine(TARGET, 3, GOOD, num_blocks=14, rows=6, budget=24)
    assert [r.output_token_ids for r in run(engine, prompts, params)] == _run(0, None, params)
    assert engine.scheduler.num_preemptions > 3


def test_min_tokens_holds_back_everything_that_ends_the_output() -> None:
    own = SamplingParams(max_tokens=20, min_tokens=12, stop_token_ids=[8], temperature=1.5, logit_bias={8: 99, 9: 98})
    for output in _run(5, GOOD, [own] * 30):
        assert len(output) == 13 and output[-1] in (8, 9)  # both are pressed for as soon as they may come


def test_transformers_toys_agree_under_mixed_parameters(toy: str, toy_draft: str) -> None:
    prompts = [list(range(5, 5 + n)) for n in (3, 17)]
    mixed: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 11,
        "max_tokens": 24,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "min_p": 0.01,
        "top_p": 0.95,
        "bad_words": ["a", "bc"],
        "logit_bias": {40: 3.0},
    }
    plain = ids(llm(toy), prompts, **mixed)
    for draft in ("ngram", toy, toy_draft):
        assert ids(llm(toy, draft, 4), prompts, **mixed) == plain
    tiny = llm(toy, toy_draft, 3, block_size=4, num_kv_blocks=14, max_num_batched_tokens=16, max_num_seqs=8)
    assert ids(tiny, prompts, **mixed) == plain


# ---------------------------------------------------------------- rows


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PARAMS, st.lists(_ids, max_size=6), st.lists(_ids, max_size=4), st.integers(0, 1000))
def test_a_row_has_the_law_written_by_hand(
    own: dict[str, Any], output: list[int], drafts: list[int], seed: int
) -> None:
    engine = table_engine(TARGET)
    request = engine.make_request("r", PROMPTS[2], SamplingParams(max_tokens=14, **own))
    for token_id in output:
        request.extend([token_id])
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    words = [[int(c) for c in w] for w in own.get("bad_words", ())]
    stop_ids = sorted(request.stop_token_ids)
    expected = law(logits.tolist(), PROMPTS[2], output + drafts, {**own, "bad_words": words}, stop_ids)
    scores = logits[None].clone()
    choice = Choice(request, len(output) + len(drafts), tuple(drafts))
    edit(scores, [choice])
    if choice.is_filtered:
        p = request.params
        scores = keep(scores, Limits.of(scores, [(p.top_k, p.top_p, p.min_p or 0.0, p.temperature)])) / p.temperature
    elif request.params.is_greedy:
        assert choose(logits[None], [choice])[0][0] == expected.index(1.0)
        return
    else:
        scores = scores / request.params.temperature
    assert torch.allclose(scores[0].softmax(0), torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_a_large_vocabulary_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """To the last bit of the filtered scores: the nucleus is cut at a rounded sum."""
    generator = torch.Generator().manual_seed(3)
    logits = (2.5 * torch.randn(24, 40_003, generator=generator)).to(dtype)
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.3},
        {"top_p": 0.99, "top_k": 900},
        {"min_p": 0.02, "top_p": 0.7},
        {"repetition_penalty": 1.3, "top_p": 0.95, "temperature": 2.0},
        {"logit_bias": {5: 9.0}, "frequency_penalty": 1.0},
    ]
    choices = []
    for i in range(24):
        own = SamplingParams(**kinds[i % 6])
        choices.append(Choice(Request(str(i), [1, 2, 3], own, noise_seed=i), 2, (7, 8)))
    together, _ = choose(logits, choices)
    assert together == [choose(logits[i : i + 1], [choice])[0][0] for i, choice in enumerate(choices)]
    limits = [
        (0, 0.9, 0.0, 1.0),
        (0, 0.5, 0.0, 3.0),
        (900, 0.99, 0.0, 1.0),
        (0, 0.7, 0.02, 1.0),
        (0, 1 - 1e-6, 0.0, 0.7),
    ]
    limits = [*limits, (40, 0.95, 0.0, 1.0)] * 4
    both = keep(logits, Limits.of(logits, limits))
    for i in range(24):
        assert torch.equal(keep(logits[i : i + 1], Limits.of(logits[i : i + 1], [limits[i]]))[0], both[i])


def test_a_draft_with_a_smaller_vocabulary_reads_what_it_can_of_the_rules() -> None:
    own = SamplingParams(allowed_token_ids=[2, 9], logit_bias={9: 5.0, 3: 1.0}, presence_penalty=1.0)
    request = Request("r", [1, 2], own)
    request.extend([9])
    assert choose(torch.zeros(1, 6, dtype=torch.float64), [Choice(request, 1, (7,))]) == ([2], [True])


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids holds 10; token ids of this model are from 0 to 9"),
        ({"logit_bias": {2**31 - 1: 1}}, "logit_bias holds 2147483647; token ids of this model are from 0 to 9"),
        ({"stop_token_ids": [10]}, "stop_token_ids holds 10"),
        ({"allowed_token_ids": [9], "min_tokens": 1}, "allowed_token_ids leaves no token"),
        ({"bad_words": list("0123456789")}, "bad_words leaves no token"),
        ({"min_tokens": 2**21, "max_tokens": None}, "min_tokens is 2097152; .* room for"),
    ],
)
def test_what_the_model_cannot_honour_is_refused_at_the_door(own: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        table_engine(TARGET).make_request("r", [1], SamplingParams(**own))


def test_bad_words_are_known_by_their_form_behind_a_space_too(toy: str) -> None:
    tokenizer = llm(toy).engine.target.model.tokenizer
    assert bad_word_ids(["ab", " c"], tokenizer, 260) == ((97, 98), (99,))  # bytes: " ab" ends in "ab" already
    with pytest.raises(InvalidRequestError, match="the target has no tokenizer"):
        bad_word_ids(["a"], None, 260)

    class Words:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": {"cat": [5, 6], " cat": [7]}[text]}

    assert bad_word_ids([" cat"], Words(), 10) == ((5, 6), (7,))
