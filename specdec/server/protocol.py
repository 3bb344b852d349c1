"""OpenAI's request shapes: which fields a body may hold, and the SamplingParams they mean.

It knows names, types and what is not supported; ranges are SamplingParams' business, tokens and
models nobody's here. A known field with a wrong value is refused by name; an unknown one is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from specdec.errors import InvalidRequestError, shown
from specdec.sampling_params import MAX_LOGPROBS, SamplingParams
from specdec.server.refusals import speaking_of
from specdec.server.structured import read_shape, shape_field
from specdec.server.tools import Tools, read_calls, read_tools

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
_STOP = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}},
    "required": ["role", "content"],
}

Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Stop = Annotated[Any, WithJsonSchema(_STOP)]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]


class StreamOptions(BaseModel):
    """What else a stream shall carry."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(BaseModel):
    """One request's own say over speculation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = None
    num_speculative_tokens: int | None = None


class GenerationBody(BaseModel):
    """The fields both endpoints share; null means the default everywhere, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Fields that ask for what is not built: only the values named here (and null) are taken.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    return_speculative_metrics: bool | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None

    @property
    def unknown_fields(self) -> list[str]:
        """Names in the body that mean nothing here."""
        return sorted(self.model_extra or {})

    def sampling_params(self) -> SamplingParams:
        """What the body asks of the sampler; raises InvalidRequestError naming the field."""
        self._refuse_unsupported()
        names = SamplingParams.__dataclass_fields__
        given = {
            name: value
            for name in type(self).model_fields
            if name in names and name not in self.own_meaning and (value := getattr(self, name)) is not None
        }
        if self.speculative is not None:
            given["speculative"] = self.speculative.model_dump(exclude_none=True)
        given["structured_outputs"] = read_shape(self.__dict__)
        with speaking_of(self.name_of_limit, "max_tokens"):
            return SamplingParams(**{**given, **self.special_params()})

    @property
    def name_of_limit(self) -> str:
        """The field that limits the output."""
        return "max_tokens"

    # Fields that are called like a sampling parameter but do not mean it as they stand.
    own_meaning: ClassVar[frozenset[str]] = frozenset({"speculative", "structured_outputs"})

    def special_params(self) -> dict[str, Any]:
        """Sampling parameters whose field differs between the endpoints; an endpoint without any has none."""
        return {}

    def _refuse_unsupported(self) -> None:
        for name, allowed in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InvalidRequestError(f"{name} is {shown(value)}; {name} is not supported yet", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is given; it needs stream=true", param="stream_options")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "suffix": ("",),
        "prompt_logprobs": (),
    }
    own_meaning: ClassVar[frozenset[str]] = GenerationBody.own_meaning | {"prompt_logprobs"}

    prompt: Prompt
    echo: bool | None = None
    suffix: Any = None
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: Any = None

    def special_params(self) -> dict[str, Any]:
        """Completions stop after 16 tokens unless told otherwise."""
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise InvalidRequestError(
                f"best_of is {self.best_of}; only best_of equal to n is supported", param="best_of"
            )
        special: dict[str, Any] = {"max_tokens": 1} if self.only_echoes else {}
        if self.echo and self.logprobs is not None:
            special["prompt_logprobs"] = self.logprobs  # an echoed prompt is scored like the output behind it
        return special

    @property
    def only_echoes(self) -> bool:
        """True where nothing but the prompt is wanted, with its scores; one token is made and dropped."""
        return bool(self.echo) and self.max_tokens == 0


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
    }
    own_meaning: ClassVar[frozenset[str]] = GenerationBody.own_meaning | {"logprobs", "max_tokens"}

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None

    def special_params(self) -> dict[str, Any]:
        """A chat answer may be as long as fits; the newer of the two names of its limit wins."""
        return self._limits() | self._demanded_call()

    def read_tools(self) -> Tools | None:
        """The functions that may be called."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def _demanded_call(self) -> dict[str, Any]:
        tools = self.read_tools()
        schema = tools.schema() if tools is not None else None
        if schema is None:
            return {}
        if (shape := shape_field(self.__dict__)) is not None:
            raise InvalidRequestError(f"tool_choice demands a call and {shape} is given", param="tool_choice")
        return {"structured_outputs": {"json": schema}}

    @property
    def name_of_limit(self) -> str:
        """The newer of the two names, where it is given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _limits(self) -> dict[str, Any]:
        limit = getattr(self, self.name_of_limit)
        if self.top_logprobs is not None and self.top_logprobs > 0 and not self.logprobs:
            raise InvalidRequestError("top_logprobs is given; it needs logprobs=true", param="top_logprobs")
        if not self.logprobs:
            return {"max_tokens": limit}
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs}; it must be an integer from 0 to {MAX_LOGPROBS}",
                param="top_logprobs",
            )
        return {"max_tokens": limit, "logprobs": self.top_logprobs or 0}


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI document says of a route's body; references are written out."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolve(schema)}}}}


def read_prompts(value: object) -> list[str] | list[list[int]]:
    """The prompts of a completion: one text, texts, ids, or lists of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) for item in value):
            return value
        if not any(isinstance(item, (str, list, dict)) for item in value):
            return [value]  # ids; the engine's door checks each
    raise InvalidRequestError(
        f"prompt is {shown(value)}; it must be a text, a list of texts, a list of token ids or a list of such lists, "
        "and hold at least one",
        param="prompt",
    )


def read_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a chat, with text parts joined into one text."""
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(
            f"messages is {shown(value)}; it must be a list with a message in it", param="messages"
        )
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} is {shown(message)}; it must be an object", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {shown(role)}; it must be one of {', '.join(ROLES)}", param="messages"
        )
    if message.get("function_call"):
        raise InvalidRequestError(f"{where}.function_call is not supported; tool_calls is", param="messages")
    content, calls = message.get("content"), message.get("tool_calls")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if calls and role == "assistant":
        return read | {
            "content": "" if content is None else _content(where, content),
            "tool_calls": read_calls(where, calls),
        }
    read["content"] = _content(where, content)
    return read | ({"tool_call_id": message["tool_call_id"]} if role == "tool" and "tool_call_id" in message else {})


def _content(where: str, content: object) -> str:
    """Text parts are one text, joined without anything between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content is {shown(content)}; it must be a text or a list of text parts", param="messages"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"{where}.content holds a part of type {shown(kind)}; only text parts are supported", param="messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.content holds a text part without a text", param="messages")
        texts.append(part["text"])
    return "".join(texts)
