"""`/tokenize` and `/detokenize`: the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response, StreamingResponse

from runtime.server.conversation import conversation_texts
from runtime.server.errors import ApiError, JsonResponse
from runtime.server.intake import ServedText, described
from runtime.server.protocol.chat import ChatRequest, Messages
from runtime.server.protocol.generation import TokenId
from runtime.server.protocol.strict import Strict
from runtime.server.response_models import BODY_ERRORS, DetokenizeResponse, TokenizeResponse, to_json, token_text
from runtime.server.routes.registry import register
from runtime.server.serving import Service

BLOCK_BYTES = 2**17


class TokenizeRequest(Strict):
    """Body of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
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


@register(order=70, bodies=[TokenizeRequest, DetokenizeRequest])
def tokenization_router(service: Service) -> APIRouter:
    """Routes of the tokenizer."""
    router = APIRouter()
    tokenizer = service.tokenizer

    @router.post(
        "/tokenize", response_model=TokenizeResponse, responses=BODY_ERRORS, openapi_extra=described(TokenizeRequest)
    )
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation up to where the answer begins."""
        return in_blocks(await service.intake.read(request, answer_tokenize))

    @router.get("/tokenizer_info")
    async def describe_tokenizer() -> Response:
        """Special tokens by name, and the chat template: what evaluation tools need to use this server's tokenizer."""
        known = {"chat_template": tokenizer.chat_template, "vocab_size": tokenizer.vocab_size}
        return JsonResponse({**tokenizer.special_tokens, **known})

    @router.post(
        "/detokenize",
        response_model=DetokenizeResponse,
        responses=BODY_ERRORS,
        openapi_extra=described(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        return in_blocks(await service.intake.read(request, answer_detokenize))

    return router


def in_blocks(answer: bytes) -> Response:
    """Returns an answer that is sent block by block: to copy all of it at once would hold the event loop."""
    starts = range(0, len(answer), BLOCK_BYTES)
    headers = {"Content-Length": str(len(answer))}
    blocks = at_once(answer[start : start + BLOCK_BYTES] for start in starts)
    return StreamingResponse(blocks, headers=headers, media_type=JsonResponse.media_type)


async def at_once(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterates without a thread per item."""
    for block in blocks:
        yield block


def answer_tokenize(served: ServedText, raw: bytes) -> bytes:
    """Returns the answer to `/tokenize` in JSON. Raises ApiError or RequestError."""
    body = served.parse(raw, TokenizeRequest)
    served.check_model(served.model_name if body.model is None else body.model)
    tokens = encode(served, body)
    answer: TokenizeResponse = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": served.limits.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [token_text(served.tokenizer.token_bytes(token_id)) for token_id in tokens]
    return to_json(answer).encode("ascii")


def answer_detokenize(served: ServedText, raw: bytes) -> bytes:
    """Returns the answer to `/detokenize` in JSON. Raises ApiError."""
    body = served.parse(raw, DetokenizeRequest)
    served.check_model(served.model_name if body.model is None else body.model)
    check_ids(body.tokens, served.tokenizer.vocab_size)
    text = served.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return to_json({"prompt": text}).encode("ascii")


def encode(served: ServedText, body: TokenizeRequest) -> list[int]:
    """Returns the token ids of a body. Slow for long texts."""
    if body.prompt is not None:
        return served.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    conversation = {"model": served.model_name, "messages": body.messages}
    texts = conversation_texts(served.tokenizer, ChatRequest.model_validate(conversation))
    return [token for text in texts for token in served.tokenizer.encode(text, add_special_tokens=False)]


def check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises ApiError with status 400 for ids outside of the vocabulary."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            message = f"tokens[{index}]: token id {token_id} is outside of the vocabulary. Ids go to {vocab_size - 1}."
            raise ApiError(400, message, f"tokens[{index}]", "refused")
