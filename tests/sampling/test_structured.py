"""Structured outputs: what a grammar forbids is never said, whatever speculates, and what it forces costs nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec
from evals import structured
from evals.schemas import SCHEMAS
from specdec.batch import Drafts, Plan, Row
from specdec.errors import InvalidRequestError
from specdec.proposers.base import NoDrafts
from specdec.request import Request
from specdec.sampling import Choice, choose
from specdec.sampling.grammar import GrammarCompiler
from specdec.sampling.guide import Guide
from specdec.sampling.matcher import Matcher
from specdec.structured_outputs import StructuredOutputsParams
from tests.engines import assert_clean, llm
from tests.sampling.by_hand import bound, chi_square, law
from tests.sampling.table_model import TableModel, known, run, table_engine
from tests.toys import VOCAB_SIZE, byte_tokenizer

PROMPT = [1, 2, 3]
SHORT = {name: SCHEMAS[name] for name in ("two fields", "enum with a shared start", "list of numbers", "optional")}
SHAPES: list[dict[str, Any]] = [
    *({"json": schema, "disable_any_whitespace": True} for schema in SHORT.values()),
    {"regex": "a{3,5}b[cd]+"},
    {"choice": ["hello", "help", 'x"é\n', "/a\\"]},
    {"grammar": 'start: "ab" start | "c"'},
    {"grammar": 'root ::= "no" | "yes" root'},
]


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {257})


def matcher(**shape: Any) -> Matcher:
    return compiler().matcher(StructuredOutputsParams(**shape))


def allowed(grammar: Matcher, text: str = "") -> str:
    drafts = list(text.encode())
    return "".join(chr(i) if i < 128 else f"<{i}>" for i in range(VOCAB_SIZE) if grammar.allows(i, drafts))


class Prose(NoDrafts):
    """Proposes the same text to whoever asks, and remembers for how much it was asked."""

    max_draft_position = None

    def __init__(self, text: bytes) -> None:
        self.text = tuple(text)
        self.asked: list[int] = []

    def propose(self, plan: Plan) -> Drafts:
        self.asked += [row.max_drafts for row in plan]
        return Drafts.of((self.text[: row.max_drafts] for row in plan), "prose")


def params(shape: dict[str, Any] | None, **own: Any) -> specdec.SamplingParams:
    return specdec.SamplingParams(structured_outputs=shape, **{"max_tokens": 60, "temperature": 0, **own})


# ---------------------------------------------------------------- matchers


def test_a_matcher_walks_over_drafts_and_comes_back() -> None:
    grammar = matcher(regex="ab(c|d)e?")
    assert allowed(grammar, "ab") == "cd" and allowed(grammar) == "a" and allowed(grammar, "abc") == "e<257>"
    assert not grammar.push(ord("a")) and not grammar.push(ord("b"))
    assert allowed(grammar, "d") == "e<257>" and allowed(grammar) == "cd"
    assert grammar.forced() == () and grammar.completes(b"de") and not grammar.completes(b"d")
    assert not grammar.push(ord("c"))  # another token than the one walked over
    assert allowed(grammar) == "e<257>" and grammar.push(ord("e"))


def test_masks_do_not_depend_on_what_was_walked_over() -> None:
    shape = {"json": SCHEMAS["order"]}
    walked, tokens = matcher(**shape), list(b'{"items": [{"sku":"ABC12", "qty": 3 }],"paid":true}')
    generator = torch.Generator().manual_seed(0)
    for done, token_id in enumerate(tokens):
        for _ in range(2):  # along the text for a while, then off it
            depth = int(torch.randint(0, 6, (), generator=generator))
            drafts = tokens[done : done + depth]
            for i in range(len(drafts) + 1):
                walked.allows(ord("}"), drafts[:i])
            walked.mask([*drafts[:1], ord("?")])
        fresh = matcher(**shape)
        assert not any(fresh.push(t) for t in tokens[:done])
        assert (walked.mask() == fresh.mask()).all() and walked.forced() == fresh.forced()
        assert walked.push(token_id) == (done == len(tokens) - 1)


def test_forced_tokens_are_those_that_masks_leave_alone() -> None:
    grammar = matcher(json=SCHEMAS["two fields"], disable_any_whitespace=True)
    assert bytes(grammar.forced()) == b'{"name":"'
    for i, token_id in enumerate(grammar.forced()):
        assert allowed(grammar, bytes(grammar.forced()[:i]).decode()) == chr(token_id)
    assert bytes(grammar.forced(b'{"name":"x"')) == b',"age":'


def test_behind_its_end_and_behind_what_it_forbids_a_grammar_says_nothing() -> None:
    grammar = matcher(choice=["ab"])
    assert grammar.mask(b"ab").min() == 255 and grammar.mask(b"x").min() == 255
    assert allowed(grammar) == "a" and grammar.forced(b"x") == ()


def test_a_limit_that_is_hit_ends_the_request_and_says_why() -> None:
    grammar = matcher(regex="a+")
    grammar.push(ord("b"))
    assert grammar.error == "the token 98 does not fit the grammar" and not grammar.mask().any()


@pytest.mark.parametrize(
    "shape",
    [
        {"json": {"type": "nope"}}, {"json": {"$ref": "#/x"}}, {"json": {"not": {}}}, {"regex": "(a"},
        {"regex": "a(?=b)"}, {"grammar": "start: ("}, {"grammar": "nothing"}, {"grammar": 'other: "a"'},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}}, {"json": {}, "whitespace_pattern": "("},
        {"grammar": "start:"}, {"grammar": 'root ::= ""'}, {"regex": "()"}, {"grammar": "start: start"},
    ],
    ids=lambda shape: json.dumps(shape)[:40],
)  # fmt: skip
def test_what_does_not_compile_is_refused_by_name(shape: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.\w+ does not compile: .") as caught:
        matcher(**shape)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 400


def test_a_model_without_a_tokenizer_takes_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="the target has no tokenizer"):
        GrammarCompiler(None, 8, {1}).matcher(StructuredOutputsParams(regex="a"))


def test_a_grammar_is_compiled_once_for_its_text() -> None:
    own = StructuredOutputsParams(json={"type": "integer"})
    assert compiler().compile(own) is compiler().compile(StructuredOutputsParams(json='{"type":"integer"}'))
    spaced = StructuredOutputsParams(json={"type": "integer"}, disable_any_whitespace=True)
    assert compiler().compile(own) is not compiler().compile(spaced)


def test_objects_can_be_closed_and_spaces_have_an_end() -> None:
    shape: dict[str, Any] = {
        "json": {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    }
    assert "z" in allowed(matcher(**shape), '{"a":{"')
    assert allowed(matcher(**shape, disable_additional_properties=True), '{"a":{"') == "b"
    assert " " in allowed(matcher(**shape), "{" + " " * 31) and " " not in allowed(matcher(**shape), "{" + " " * 32)
    assert " " not in allowed(matcher(**shape, disable_any_whitespace=True), "{")


# ---------------------------------------------------------------- whole outputs

TABLE = TableModel.random(9, VOCAB_SIZE, scale=2.0, eos=frozenset({257}), tokenizer=byte_tokenizer())


def _run(sets: list[specdec.SamplingParams], k: int = 0, proposer: Any = None, **options: Any) -> list[Request]:
    return run(table_engine(TABLE, k, proposer, **options), [PROMPT] * len(sets), sets)


def _ids(requests: list[Request]) -> list[list[int]]:
    return [r.output_token_ids for r in requests]


def _text(request: Request) -> str:
    return bytes(t for t in request.output_token_ids if t < 256).decode()


def _steps(requests: list[Request]) -> int:
    return sum(r.stats.num_steps for r in requests)


def test_outputs_match_their_grammars_and_are_those_of_plain_decoding() -> None:
    """In one batch with a row that has none; drafts from a near model, a strange one and the target itself."""
    sets = [params(s, seed=i, temperature=i % 2, max_tokens=48) for i, s in enumerate([*SHAPES, None])]
    plain = _run(sets)
    for request, schema in zip(plain, SHORT.values(), strict=False):
        assert structured.is_valid(_text(request), schema)
    assert not structured.is_valid('{"name": 5}', SCHEMAS["two fields"])
    assert [r.finish_reason for r in plain[:-1]] == ["stop"] * len(SHAPES)
    for proposer, k in ((TABLE.near(1, 0.5), 4), (TableModel.random(3, VOCAB_SIZE), 2)):
        requests = _run(sets, k, proposer)
        assert _ids(requests) == _ids(plain) and _steps(requests) < _steps(plain)
    engine = table_engine(TABLE, 3, TABLE.near(1, 0.5), num_blocks=18, rows=6, budget=24)
    assert _ids(run(engine, [PROMPT] * len(sets), sets)) == _ids(plain)
    assert engine.scheduler.num_preemptions > 0


def test_a_transformers_model_speaks_by_grammar_and_stops_with_it(toy: str) -> None:
    sets = [params({"regex": "[abc]{30}"}, stop=["bc", "ca"], seed=3, temperature=1.0)]
    sets += [params({"json": SCHEMAS["two fields"], "disable_any_whitespace": True}, n=2, temperature=1.0, seed=5)]
    texts = []
    for draft, k in ((None, None), ("ngram", 4)):
        made = llm(toy, draft, k)
        texts.append([c for o in made.generate([PROMPT] * 2, sets, progress=False) for c in o.outputs])
        assert_clean(made)
    plain, guessed = texts
    assert [c.token_ids for c in plain] == [c.token_ids for c in guessed]
    assert set(plain[0].text) <= set("abc") and plain[0].finish_reason == "stop" and len(plain[0].token_ids) < 30
    assert all(structured.is_valid(c.text, SCHEMAS["two fields"]) for c in plain[1:]) and plain[1].text != plain[2].text


def test_forced_tokens_save_target_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [params({"json": schema, "disable_any_whitespace": True}) for schema in SHORT.values()]
    plain, requests = _run(sets), _run(sets, 2, Prose(bytes([7] * 9)))  # its drafts never fit
    assert _ids(requests) == _ids(plain)
    with capsys.disabled():
        print(f"\ntarget steps of {len(sets)} outputs: {_steps(plain)} plain, {_steps(requests)} with forced tokens")
    assert _steps(requests) < 0.6 * _steps(plain)
    assert all(r.stats.acceptance_rate == 1.0 for r in requests)
    engine = table_engine(TABLE, 2, Prose(bytes([7] * 9)))
    engine.guide.most_forced = 0
    assert _steps(run(engine, [PROMPT] * len(sets), sets)) == _steps(plain)


Check = Callable[[Request, str], bool]
BESIDE: list[tuple[dict[str, Any], dict[str, Any], Check]] = [
    (
        {"regex": "[ab]{2,40}"},
        {"min_tokens": 20, "logit_bias": {257: 100}},
        lambda r, text: len(text) == 20 and r.output_token_ids[-1] == 257,
    ),
    ({"regex": "[ab]{2,20}"}, {"ignore_eos": True, "logit_bias": {257: 100}}, lambda r, text: len(text) == 20),
    (
        {"regex": "[ab]{2,9}c"},
        {"bad_words": ["c", "ab"]},  # where the grammar leaves nothing else, it wins
        lambda r, text: text.endswith("c") and "ab" not in text and len(text) == 10,
    ),
    (  # a stop id that the grammar forces before min_tokens is a token like others; behind them it ends the output
        {"regex": "(ax|bx){9}"},
        {"stop_token_ids": [120], "min_tokens": 7, "ignore_eos": True},
        lambda r, text: len(text) == 8 and text[-1] == "x",
    ),
    ({"regex": "[abc]{30}"}, {"bad_words": ["a"]}, lambda r, text: set(text) == {"b", "c"}),
    ({"regex": "[abc]{30}"}, {"logit_bias": {99: 100}, "frequency_penalty": 2.0}, lambda r, text: text == "c" * 30),
    ({"choice": ["xyz"]}, {"min_tokens": 10, "allowed_token_ids": [1]}, lambda r, text: text == "xyz"),
    ({"regex": "[a-f]{9}"}, {"temperature": 1.2, "top_p": 0.7, "min_p": 0.1}, lambda r, text: len(text) == 9),
    ({"json_object": True}, {"max_tokens": 12}, lambda r, text: text[0] == "{" and r.finish_reason == "length"),
    (
        {"regex": "[abc]{9}"},
        {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
        lambda r, text: all({i for i, _ in v.top} <= set(b"abc") for v in r.logprobs),
    ),
    ({"regex": "[abc]{9}"}, {"speculative": {"enabled": False}}, lambda r, text: r.stats.num_draft_tokens == 0),
]


def test_other_parameters_hold_beside_a_grammar() -> None:
    sets = [params(shape, **{"seed": i, **own}) for i, (shape, own, _) in enumerate(BESIDE)]
    plain = _run(sets)
    for request, (shape, own, check) in zip(plain, BESIDE, strict=True):
        assert check(request, _text(request)), (shape, own, _text(request))
    answers = {seed: r.output_token_ids for seed, r in enumerate(plain)}
    wrong = known(answers, VOCAB_SIZE, wrong=True)
    for proposer in (known(answers, VOCAB_SIZE), wrong, Prose(bytes([200] * 9)), TABLE.near(2, 0.5)):
        requests = _run(sets, 4, proposer)
        assert _ids(requests) == _ids(plain)
        assert [r.finish_reason for r in requests] == [r.finish_reason for r in plain]
        assert [len(r.logprobs) for r in requests] == [len(r.logprobs) for r in plain]


def test_an_aborted_neighbour_changes_nothing() -> None:
    one = params(SHAPES[0], seed=1, temperature=1.0)
    engine = table_engine(TABLE, 4, TABLE.near(1, 0.5))
    first, second = (engine.make_request(f"r{i}", PROMPT, one) for i in range(2))
    engine.add(first)
    engine.add(second)
    for _ in range(2):
        engine.step()
    engine.abort("r0")
    while engine.has_work:
        engine.step()
    assert second.output_token_ids == _ids(_run([one]))[0]


def test_a_grammar_whose_limit_is_hit_fails_alone() -> None:
    engine = table_engine(TABLE)
    first, second = (engine.make_request(f"r{i}", PROMPT, params({"regex": "[ab]{9}"})) for i in range(2))
    assert isinstance(first.grammar, Matcher)
    first.grammar.error = "too many items"
    for request in (first, second):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert first.error == "the output left the grammar's limits: too many items" and first.finish_reason == "error"
    assert second.finish_reason == "stop" and len(second.output_token_ids) == 9


def test_drafts_of_prose_are_cut_and_full_rows_are_not_asked() -> None:
    """Field case 45: a draft id that breaks the JSON grammar must not kill the engine."""
    prose = Prose(b"Sure! Here is")
    shape = {"json": SCHEMAS["list of numbers"], "disable_any_whitespace": True}
    [request] = _run([params(shape)], 4, prose)
    assert structured.is_valid(_text(request), shape["json"])
    assert 0 in prose.asked[1:] and 4 in prose.asked  # inside the scores there is something to guess
    assert request.stats.acceptance_rate == 1.0 and request.stats.num_draft_tokens > 9  # only forced tokens rode


# ---------------------------------------------------------------- the law


def test_masked_rows_follow_the_renormalised_law() -> None:
    """3,000 draws; a right sampler fails with probability one in a million, and the seeds are fixed besides."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    choices = []
    grammar = matcher(regex="x[aceg]{2}")  # shared: reading a mask changes nothing
    for seed in range(3_000):
        request = Request(str(seed), PROMPT, specdec.SamplingParams(), noise_seed=seed)
        request.grammar = grammar
        choices.append(Choice(request, 1, (ord("x"),)))
    ids, _ = choose(logits.expand(len(choices), -1), choices)
    expected = law(logits.tolist(), PROMPT, [], {"allowed_token_ids": list(b"aceg")})
    statistic, freedom = chi_square([(i,) for i in ids], {(i,): p for i, p in enumerate(expected) if p})
    assert statistic < bound(freedom)
    free = law(logits.tolist(), PROMPT, [], {"allowed_token_ids": list(b"acegx")})
    assert chi_square([(i,) for i in ids], {(i,): p for i, p in enumerate(free) if p})[0] > bound(4)


def test_rows_without_a_grammar_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pay nothing: no copy, no mask."""
    engine = table_engine(TableModel.random(0))
    choice = Choice(engine.make_request("r", [1], specdec.SamplingParams(seed=1)), 0)
    monkeypatch.setattr("specdec.sampling.sampler.edit", None)
    assert choose(torch.zeros(1, 8, dtype=torch.float64), [choice])[1] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--compact"], ["--temperature", "1"]], ids=" ".join)
def test_fifty_schemas_on_the_real_model(options: list[str], tmp_path: Any) -> None:
    """`make test-slow`, or `python -m evals.structured`."""
    assert structured.main([*options, "--out", str(tmp_path / "results.jsonl")]) == 0


@pytest.mark.parametrize("spelt", ["<pad>", "<bos>", "<eos>"])
def test_text_that_spells_a_special_token_is_text(spelt: str) -> None:
    tokenizer = byte_tokenizer()
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    assert spelt in special
    for shape in ({"regex": f"a{spelt}b"}, {"choice": [f"a{spelt}b"]}, {"grammar": f'start: "a{spelt}b"'}):
        grammar = matcher(**shape)
        assert bytes(grammar.forced()).decode() == f"a{spelt}b"
        for token_id in f"a{spelt}b".encode():
            assert grammar.allows(token_id, ())
            grammar.push(token_id)
        assert not grammar.error and grammar.completes(())


def test_an_output_that_leaves_its_grammar_ends_at_that_token() -> None:
    request = Request("r", PROMPT, specdec.SamplingParams())
    request.grammar = matcher(regex="ab+")
    assert request.extend([ord("a"), ord("x"), ord("b")]) == 2
    assert (
        request.finish_reason is not None and request.finish_reason.value == "error" and "grammar" in str(request.error)
    )


def test_closing_objects_leaves_data_alone() -> None:
    data = {"properties": {"a": 1}}
    closed = matcher(json={"const": data}, disable_additional_properties=True, disable_any_whitespace=True)
    assert bytes(closed.forced()).decode() == json.dumps(data, separators=(",", ":"))
    named = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {"const": 1}}}}}
    inner = matcher(json=named, disable_additional_properties=True, disable_any_whitespace=True)
    text = b'{"properties":{"'
    assert [chr(i) for i in range(97, 123) if inner.allows(i, list(text))] == ["a"]


def test_a_requests_own_limit_on_drafts_holds_for_forced_tokens() -> None:
    request = Request("r", PROMPT, specdec.SamplingParams(speculative={"num_speculative_tokens": 1}))
    request.grammar = matcher(regex="abcdefgh[0-9]")
    assert Guide().budget(request, 0) == 1
    free = Request("r", PROMPT, specdec.SamplingParams())
    free.grammar = matcher(regex="abcdefgh[0-9]")
    assert Guide().budget(free, 0) == 8


def test_a_schema_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError, match="cannot be shown"):
        StructuredOutputsParams(json=deep)


def test_what_a_grammar_forces_is_marked_certain_wherever_it_stands() -> None:
    """The proposer guesses `x` and then what must come; `y` is a guess again, and the rest rides behind it."""
    request = Request("r", PROMPT, specdec.SamplingParams(max_tokens=50), max_output_tokens=50)
    request.grammar = matcher(regex="[wx]ab[yz]cde[0-9]")
    request.num_computed_tokens = len(PROMPT) - 1
    plan = Plan((Row(request, len(PROMPT) - 1, 1, 9),))
    guessed = Guide().admit(plan, Drafts.of([tuple(b"xaby")], "prose")).offers[0]
    assert bytes(guessed.token_ids) == b"xabycde"
    assert guessed.certain == (False, True, True, False, True, True, True)
    assert guessed.cut(2).certain == (False, True)
    wrong = Guide().admit(plan, Drafts.of([tuple(b"q")], "prose")).offers[0]
    assert not wrong.token_ids and not wrong.certain
