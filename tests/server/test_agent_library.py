"""Another program that speaks OpenAI's protocol, unchanged: agents of pydantic-ai, with tools and typed answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import specdec
from specdec.engine import Engine
from tests.server.scripted import EOS, scripted_engine
from tests.server.support import live_server
from tests.toys import make_toy

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed: pip install '.[dev]'")


class Weather(BaseModel):
    """An answer with few values, so that any model that keeps to the schema ends soon."""

    sky: Literal["clear", "grey"]
    degrees: Annotated[int, Field(ge=0, le=9)]


def agent(url: str, **options: Any) -> Any:
    """An agent whose model is served at `url`."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("toy", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))
    return pydantic_ai.Agent(model, **options)


def answering(*answers: str) -> Engine:
    """An engine that gives these answers, one after the other, whatever it is asked."""
    engine = scripted_engine([0] * 4096, max_model_len=4096, num_drafts=3)
    story: list[int] = engine.target.story  # type: ignore[attr-defined]
    left, make_request = iter(answers), engine.make_request

    def learn(request_id: str, prompt: Any, *rest: Any, **options: Any) -> Any:
        answer = [*next(left).encode(), EOS]
        story[len(prompt) : len(prompt) + len(answer)] = answer
        return make_request(request_id, prompt, *rest, **options)

    engine.make_request = learn  # type: ignore[method-assign]
    return engine


def test_an_agent_calls_a_tool_and_says_what_came_of_it() -> None:
    asked: list[str] = []

    def weather(place: str) -> str:
        """The weather of a place."""
        asked.append(place)
        return "rain"

    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
    with live_server(answering(call, "It rains in Oslo.")) as url:
        result = agent(url, tools=[weather], instructions="Be brief.").run_sync("How is it in Oslo?")
    assert asked == ["Oslo"] and result.output == "It rains in Oslo."
    assert result.usage.requests == 2 and result.usage.output_tokens > len(call)


def test_an_agent_streams() -> None:
    async def use(url: str) -> list[str]:
        async with agent(url).run_stream("Hello?") as stream:
            return [part async for part in stream.stream_text(delta=True, debounce_by=None)]

    with live_server(answering("Hello there, it is \U0001f600.")) as url:
        parts = asyncio.run(use(url))
    assert "".join(parts) == "Hello there, it is \U0001f600." and len(parts) > 3


@pytest.fixture
def toy_url(tmp_path: Path) -> Iterator[str]:
    """A model of random weights that speculates, long enough for the description of a tool in bytes."""
    toy = make_toy(tmp_path / "toy", max_position_embeddings=2048)
    with live_server(specdec.LLM(toy, draft="ngram", num_kv_blocks=512).engine) as url:
        yield url


@pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput"])
def test_a_typed_answer_is_of_its_type_from_any_model(toy_url: str, way: str) -> None:
    """By a demanded call and by a schema: a model of random weights has no choice but to be valid."""
    typed = agent(toy_url, output_type=getattr(pydantic_ai, way)(Weather), retries=0)
    for seed in range(2):
        result = typed.run_sync("How is it in Oslo?", model_settings={"seed": seed, "max_tokens": 600})
        assert isinstance(result.output, Weather)
