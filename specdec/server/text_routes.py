"""/tokenize and /detokenize: the served tokenizer for clients who count tokens.

It knows text and ids; nothing is generated here.
"""

from __future__ import annotations

import functools

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from specdec.errors import InvalidRequestError
from specdec.server.body import parse_object
from specdec.server.protocol import Messages, body_schema, read_messages
from specdec.server.refusals import read_body
from specdec.server.serving import Serving


class TokenizeBody(BaseModel):
    """POST /tokenize: a text, or a conversation as the chat endpoint would see it."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[int]


def add_text_routes(app: FastAPI, serving: Serving) -> None:
    """Both routes."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = read_body(TokenizeBody, parse_object(await request.body()))
        serving.check_model(body.model)
        token_ids = await _encode(serving, body)
        reply = {"count": len(token_ids), "max_model_len": serving.engine.engine.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            reply["token_strs"] = await _decode(serving, [[token_id] for token_id in token_ids])
        return JSONResponse(reply)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = read_body(DetokenizeBody, parse_object(await request.body()))
        serving.check_model(body.model)
        vocab_size = serving.engine.engine.target.model.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"tokens holds {token_id}; token ids are from 0 to {vocab_size - 1}", param="tokens"
                )
        return JSONResponse({"prompt": (await _decode(serving, [body.tokens]))[0]})


async def _encode(serving: Serving, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        return await serving.encode_chat(read_messages(body.messages))
    return (await serving.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False))[0]


async def _decode(serving: Serving, lists: list[list[int]]) -> list[str]:
    """The text of every list of ids."""
    tokenizer = serving.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("the target has no tokenizer, so ids have no text here", param="tokens")
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return await serving.offload(sum(map(len, lists)), lambda: [decode(token_ids) for token_ids in lists])
