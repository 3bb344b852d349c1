"""Tools of a chat: what a request offers and demands, and how the model is told.

It knows OpenAI's shapes of tools and calls and the Hermes words for them, `<tool_call>` with JSON inside.
It reads no output; that is `tool_calls`' business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import InvalidRequestError, shown

Json = dict[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KINDS = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a chat may call.

    definitions   as the request gave them, checked
    demanded      names one of which must be called; empty: the model decides
    most          calls of one answer; None: no limit
    """

    definitions: tuple[Json, ...]
    demanded: tuple[str, ...] = ()
    most: int | None = None

    def schema(self) -> Json | None:
        """The JSON schema of an answer that is one demanded call; None where the model decides."""
        if not self.demanded:
            return None
        functions = [d["function"] for d in self.definitions if d["function"]["name"] in self.demanded]
        calls = [_call_schema(function["name"]) for function in functions]
        parameters = {f["name"]: _below(f["name"], f.get("parameters") or {"type": "object"}) for f in functions}
        return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": parameters}


def _call_schema(name: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _below(name: str, schema: Any) -> Any:
    """The same schema where it is no longer the root: what it refers to within itself has moved with it."""
    if isinstance(schema, list):
        return [_below(name, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in ("const", "enum") else _below(name, value) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{target[1:]}"
    return moved


def read_tools(tools: object, choice: object, parallel: bool | None = None) -> Tools | None:
    """What the fields `tools`, `tool_choice` and `parallel_tool_calls` mean; None where nothing may be called."""
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(f"tool_choice is {shown(choice)}; it needs tools", param="tool_choice")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools is {shown(tools)}; it must be a list of at most {MAX_TOOLS}", param="tools")
    definitions = tuple(_definition(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    names = [d["function"]["name"] for d in definitions]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"tools holds two functions {name!r}; names must differ", param="tools")
    demanded = _demanded(choice, names)
    if choice == "none":
        return None
    return Tools(definitions, demanded, 1 if demanded or parallel is False else None)


def _definition(where: str, tool: object) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidRequestError(f"{where} is of type {shown(kind)}; only 'function' is supported", param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function is {shown(function)}; it must be an object", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name is {shown(name)}; it must be 1 to 64 letters, digits, '_' or '-'", param="tools"
        )
    for key, kind in (("parameters", dict), ("description", str)):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            needed = "a JSON schema" if kind is dict else "a text"
            raise InvalidRequestError(f"{where}.function.{key} is {shown(value)}; it must be {needed}", param="tools")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise InvalidRequestError(
            f"{where}.function.parameters has the type {shown(kind)}; arguments are an object", param="tools"
        )
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _demanded(choice: object, names: list[str]) -> tuple[str, ...]:
    if choice is None or choice in ("none", "auto"):
        return ()
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)}; it must be one of {', '.join(_KINDS)} or name a function",
            param="tool_choice",
        )
    name = function.get("name")
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {shown(name)}; tools has {', '.join(names)}", param="tool_choice")
    return (str(name),)


def read_calls(where: str, calls: object) -> list[Json]:
    """Calls of an earlier answer, arguments as objects, the form that chat templates expect."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where}.tool_calls is {shown(calls)}; it must be a list", param="messages")
    return [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _call(where: str, call: object) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} is {shown(call)}; it must name a function", param="messages")
    arguments = function.get("arguments")
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, (str, type(None))) else arguments
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InvalidRequestError(
            f"{where}.function.arguments is {shown(arguments)}; it must be a JSON object", param="messages"
        )
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": given}}


def check_template(template: str) -> bool:
    """True where the model's chat template tells of tools by itself, in words that can be read back.

    Raises InvalidRequestError where it writes calls in a form that is not read here.
    """
    if "tools" not in template:
        return False
    if OPEN not in template:
        raise InvalidRequestError(
            f"tools are given, but this model's chat template writes calls in another form than {OPEN} (the form of "
            "Hermes and Qwen), which is not supported",
            param="tools",
        )
    return True


def knows_calls(template: str) -> bool:
    """True where the template writes earlier calls by itself."""
    return "tool_calls" in template


def in_words(messages: Sequence[Json], tools: Tools | None) -> list[Json]:
    """The same conversation for a template that knows no tools: they are told, called and answered in text."""
    told = [_without_calls(message) for message in messages]
    if tools is None:
        return told
    words = _instructions(tools)
    if told and told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _instructions(tools: Tools) -> str:
    lines = "\n".join(json.dumps(d["function"], ensure_ascii=False) for d in tools.definitions)
    return (
        "These functions can be called; each is described by one line of JSON.\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and arguments as JSON between tags, one pair of tags for each call:\n"
        f'{OPEN}\n{{"name": "<function>", "arguments": {{<arguments>}}}}\n{CLOSE}'
    )


def _without_calls(message: Json) -> Json:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    parts = [message["content"], *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]
    return {"role": message["role"], "content": "\n".join(part for part in parts if part)}
