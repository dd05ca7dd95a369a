"""`/tokenize` and `/detokenize`: the tokenizer of the served model."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from runtime.server.chat import render_conversation
from runtime.server.errors import ApiError, JsonResponse
from runtime.server.protocol import Strict, TokenId
from runtime.server.protocol_chat import ChatRequest, Message
from runtime.server.response_models import BODY_ERRORS, DetokenizeResponse, TokenizeResponse, token_text
from runtime.server.serving import Service


class TokenizeRequest(Strict):
    """Body of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its own to a prompt, such as a beginning token; true is the default"
    )
    return_token_strs: bool | None = Field(None, description="also give the text of each token")

    @model_validator(mode="after")
    def check_one_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is allowed only with prompt: chat templates write theirs themselves")
        return self


class DetokenizeRequest(Strict):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="leave them out of the text; false is the default")


def tokenization_router(service: Service) -> APIRouter:
    """Routes of the tokenizer."""
    router = APIRouter()
    tokenizer = service.tokenizer

    @router.post("/tokenize", response_model=TokenizeResponse, responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation up to where the answer begins."""
        service.check_model(service.model_name if body.model is None else body.model)
        tokens = await asyncio.to_thread(encode, service, body)
        answer: TokenizeResponse = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": service.limits.max_model_len,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_text(tokenizer.token_bytes(token_id)) for token_id in tokens]
        return JsonResponse(answer)

    @router.get("/tokenizer_info")
    async def describe_tokenizer() -> Response:
        """Special tokens by name, and the chat template: what evaluation tools need to use this server's tokenizer."""
        known = {"chat_template": tokenizer.chat_template, "vocab_size": tokenizer.vocab_size}
        return JsonResponse({**tokenizer.special_tokens, **known})

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        service.check_model(service.model_name if body.model is None else body.model)
        check_ids(body.tokens, tokenizer.vocab_size)
        skip = bool(body.skip_special_tokens)
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=skip)
        return JsonResponse({"prompt": text})

    return router


def encode(service: Service, body: TokenizeRequest) -> list[int]:
    """Returns the token ids of a body. Slow for long texts."""
    if body.prompt is not None:
        return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    conversation = {"model": service.model_name, "messages": body.messages}
    text = render_conversation(service.tokenizer, ChatRequest.model_validate(conversation))
    return service.tokenizer.encode(text, add_special_tokens=False)


def check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises ApiError with status 400 for ids outside of the vocabulary."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            message = f"tokens[{index}]: token id {token_id} is outside of the vocabulary. Ids go to {vocab_size - 1}."
            raise ApiError(400, message, f"tokens[{index}]", "refused")
