"""Tools: told to the model, read back from its answer, streamed or not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.grammar import GrammarCompiler
from specdec.server.protocol import read_messages
from specdec.server.tool_calls import ToolCallReader
from specdec.server.tools import Tools, check_template, in_words, read_tools
from specdec.structured_outputs import StructuredOutputsParams
from tests.server.scripted import EOS, scripted_engine
from tests.server.test_chat import post
from tests.toys import VOCAB_SIZE, byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = [{"role": "user", "content": "hello"}]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo </tool_call> é"}}\n</tool_call>'
NOW = '<tool_call>{"name": "clock"}</tool_call>'
BROKEN = '<tool_call>{"name": </tool_call>'


def tools(*definitions: Any, **options: Any) -> Tools:
    read = read_tools(list(definitions or (WEATHER, CLOCK)), options.get("choice"), options.get("parallel"))
    assert read is not None
    return read


def answering(answer: str, messages: Any = ASK, **options: Any) -> Any:
    """An engine that says `answer` to these messages with both tools offered."""
    told = in_words(read_messages(messages), tools())
    prompt = "".join(f"<{m['role']}>{m['content']}\n" for m in told) + "<assistant>"
    return scripted_engine([256, *prompt.encode(), *answer.encode(), EOS], max_model_len=4096, **options)


def read(answer: str, cuts: list[int], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """What is said and called, the answer given in parts."""
    reader, said, calls = ToolCallReader(tools(**options)), "", []
    places = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    for start, end in itertools.pairwise(places):
        text, new = reader.push(answer[start:end], is_last=False)
        said, calls = said + text, calls + new
    text, new = reader.push("", is_last=True)
    return said + text, [(call.name, json.loads(call.arguments)) for call in [*calls, *new]]


OSLO_CALL, NOW_CALL = ("weather", {"place": "Oslo </tool_call> é"}), ("clock", {})


@pytest.mark.parametrize(
    "answer, said, calls",
    [
        ("Hello <b> there.", "Hello <b> there.", []),
        (OSLO, "", [OSLO_CALL]),
        (f"Let me see. {OSLO}\n{NOW}\n", "Let me see.", [OSLO_CALL, NOW_CALL]),
        (OSLO.removesuffix("</tool_call>"), "", [OSLO_CALL]),
        (f"{BROKEN} and {NOW}", f"{BROKEN} and", [NOW_CALL]),
        ("<tool_call>never ends", "<tool_call>never ends", []),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', "", [NOW_CALL]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut(answer: str, said: str, calls: Any, cuts: list[int]) -> None:
    assert read(answer, cuts) == (said, calls)


def test_one_call_at_a_time_where_the_request_says_so() -> None:
    assert read(OSLO + NOW, [5, 50], parallel=False) == ("", [OSLO_CALL])


def test_a_demanded_call_is_the_whole_answer() -> None:
    answer = '{"name": "clock", "arguments": {"zone": "<tool_call>"}}'
    assert read(answer, [3, 20], choice="required") == ("", [("clock", {"zone": "<tool_call>"})])
    assert read(answer[:-4], [3], choice="required") == (answer[:-4], [])
    assert tools(choice="required").schema()["anyOf"][1]["properties"]["name"] == {"const": "clock"}  # type: ignore[index]
    named = tools(choice={"type": "function", "function": {"name": "weather"}}).schema()
    assert named is not None and named["$defs"]["weather"] == WEATHER["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_parameters_may_refer_to_their_own_definitions(choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/X"}, "again": {"$ref": "#"}, "note": {"const": {"$ref": "#"}}},
        "required": ["x"],
        "$defs": {"X": {"enum": [1, 2]}},
    }
    pick = {"type": "function", "function": {"name": "pick", "parameters": parameters}}
    schema = tools(pick, CLOCK, choice=choice).schema()
    grammar = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {257})
    matcher = grammar.matcher(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    good = '{"name":"pick","arguments":{"x":2,"again":{"x":1},"note":{"$ref":"#"}}}'
    for i, byte in enumerate(good.encode()):
        assert matcher.allows(byte, ()), good[:i]
        matcher.push(byte)
    assert not matcher.error


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_answered_in_openais_form(num_drafts: int, stream: bool) -> None:
    engine = answering(f"One moment. {OSLO}{NOW}", num_drafts=num_drafts)
    status, reply = post(engine, messages=ASK, tools=[WEATHER, CLOCK], stream=stream)
    assert status == 200
    if stream:
        deltas = [c["choices"][0] for c in reply]
        assert "".join(d["delta"].get("content") or "" for d in deltas) == "One moment."
        calls = [call for d in deltas for call in d["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1]
        assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["tool_calls"]
    else:
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "One moment."
        calls = choice["message"]["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [OSLO_CALL, NOW_CALL]
    assert all(c["type"] == "function" and c["id"] for c in calls) and calls[0]["id"] != calls[1]["id"]


def test_an_answer_without_a_call_is_as_ever() -> None:
    _, reply = post(answering("Hi there!"), messages=ASK, tools=[WEATHER, CLOCK])
    assert reply["choices"][0]["message"]["content"] == "Hi there!" and reply["choices"][0]["finish_reason"] == "stop"
    _, plain = post(scripted_engine(), messages=ASK, tools=[WEATHER], tool_choice="none", max_tokens=1)
    _, bare = post(scripted_engine(), messages=ASK, max_tokens=1)
    assert plain["usage"] == bare["usage"]  # what may not be called is not told


def test_a_conversation_with_calls_and_their_results_goes_on() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    _, reply = post(answering("It rains.", messages), messages=messages, tools=[WEATHER, CLOCK])
    assert reply["choices"][0]["message"]["content"] == "It rains."
    told = in_words(read_messages(messages), tools())
    assert [m["role"] for m in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.") and '"name": "weather"' in told[0]["content"]
    assert json.loads(told[2]["content"].split("\n")[1]) == {"name": "weather", "arguments": {"place": "Oslo"}}
    assert "rain" in told[3]["content"]


@pytest.mark.parametrize(
    "param, body",
    [
        ("tools", {"tools": "weather"}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}),
        ("tools", {"tools": [WEATHER, WEATHER]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "weather"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}),
        (
            "tool_choice",
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
        ),
        ("functions", {"functions": [{"name": "weather"}]}),
        ("messages", {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
        (
            "messages",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(param: str, body: Any) -> None:
    status, reply = post(scripted_engine(), **({"messages": ASK} | body))
    assert status == 400 and reply["error"]["param"] == param, reply


def test_a_template_of_another_form_is_refused() -> None:
    assert not check_template("{{ messages }}")
    assert check_template("{% if tools %}<tool_call>{% endif %}")
    with pytest.raises(ValueError, match="another form"):
        check_template("{% if tools %}[TOOL_CALLS]{% endif %}")
