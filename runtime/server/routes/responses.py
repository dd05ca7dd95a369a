"""`/v1/responses`: chats in the form of OpenAI's newer API. Nothing is stored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason
from runtime.server.answers import Answer, Deltas, each
from runtime.server.errors import ApiError, renaming
from runtime.server.intake import ServedText, described
from runtime.server.protocol.chat import ChatRequest
from runtime.server.response_models import MAY_STREAM
from runtime.server.routes.chat import PreparedChat, TokenFrames, prepare_conversation
from runtime.server.routes.protocol_responses import ResponsesRequest
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.routes.response_items import ItemWriter, Logprobs
from runtime.server.routes.response_object import ResponseObject
from runtime.server.serving import Service
from runtime.text.answer_form import ReasoningCounter
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked body of `/v1/responses`.

    Attributes:
        echoed: fields of the request that its answer repeats.
    """

    chat: PreparedChat
    echoed: dict[str, Any]


@dataclass
class ResponseAnswer(Answer):
    """Writes one answer as a response object, whole or as its events.

    Attributes:
        envelope: `id`, `created_at`, `model` and what the request said.
    """

    envelope: dict[str, Any]
    chat: PreparedChat
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.writer = ItemWriter(self.chat.form, TokenFrames(self.tokenizer))
        self.reasoning = ReasoningCounter(self.chat.form, self.tokenizer.token_bytes)

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        output = Delta(self.envelope["id"])
        async for delta in each(deltas):
            output.append(delta)
        for _ in self.writer.push(output.text, output.finish_reason):
            pass
        self.count_reasoning(output)
        if self.chat.with_logprobs:  # long lists are written as they are sent
            message = self.writer.items[-1]
            (part,) = message["content"]
            message["content"] = iter([{**part, "logprobs": self.writer.tokens.described(self.logprobs(output))}])
        return {**self.response(output), "output": iter(self.writer.items)}

    def begin(self, first: Delta) -> bytes:
        response = self.response(None)
        return b"".join(self.writer.next_event(name, response=response) for name in ("created", "in_progress"))

    def write(self, delta: Delta) -> bytes:
        written = b"".join(self.writer.push(delta.text, delta.finish_reason, self.logprobs(delta)))
        self.count_reasoning(delta)
        if delta.finish_reason is None:
            return written
        last = self.response(delta)
        return written + self.writer.next_event(last["status"], response=last)

    def end(self, error: ApiError | None) -> bytes:
        if error is None:
            return b""
        failure = {"status": "failed", "error": {"code": "server_error", "message": error.detail}}
        return self.writer.next_event("failed", response={**self.response(None), **failure})

    def logprobs(self, delta: Delta) -> Logprobs:
        return [*zip(delta.token_ids, delta.logprobs, strict=True)] if self.chat.with_logprobs else ()

    def count_reasoning(self, delta: Delta) -> None:
        if self.chat.form.reasoning is not None:
            self.reasoning.add(0, delta.token_ids)

    def response(self, last: Delta | None) -> dict[str, Any]:
        """Returns the object as it is before the first token, or at the end."""
        if last is None:
            return {**self.envelope, "status": "in_progress", "output": [], "usage": None}
        is_cut = last.finish_reason is FinishReason.LENGTH
        ended: dict[str, Any] = {"status": "incomplete" if is_cut else "completed", "output": self.writer.items}
        if is_cut:
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**self.envelope, **ended, "usage": usage_of(last, self.reasoning.count)}


def usage_of(last: Delta, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": last.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": last.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": last.num_prompt_tokens + last.num_output_tokens,
    }


def prepare_response(served: ServedText, raw: bytes) -> PreparedResponse:
    """As `prepare_chat`."""
    body = served.parse(raw, ResponsesRequest)
    with renaming(**FIELD_NAMES):
        chat = prepare_conversation(served, served.validate(body.as_chat(), ChatRequest), FIELD_NAMES, **body.ignored)
    if body.wants_logprobs and not chat.form.is_plain:
        message = (
            "Log-probabilities are reported of answers without tools and reasoning only. Ask /v1/chat/completions."
        )
        raise ApiError(400, message, "include", "refused")
    return PreparedResponse(chat, echo(body))


FIELD_NAMES = {"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
FIELD_NAMES |= {"response_format": "text.format"}
"""Names of fields in this form, by those of chats."""


def echo(body: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of a request that its answer repeats, with their defaults."""
    written = body.model_dump(by_alias=True, exclude_none=True)
    text = {"format": {"type": "text"}} | written.get("text", {})
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in written.get("tools", ())]
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None} | written.get("reasoning", {}),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": written.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


NOTHING_STORED = {"background": False, "previous_response_id": None, "store": False}


@register(order=40, bodies=[ResponsesRequest])
def responses_router(service: Service) -> APIRouter:
    """The route of responses."""
    router = APIRouter(route_class=PlainRoute)
    options: dict[str, Any] = {"responses": MAY_STREAM, "openapi_extra": described(ResponsesRequest)}

    @router.post("/v1/responses", response_model=ResponseObject, **options)
    async def create_response(request: Request) -> Response:
        """Answers a conversation of items. Nothing is stored."""
        body = await service.intake.read(request, prepare_response)
        request_id = f"resp_{request.state.request_id}"
        envelope = {"id": request_id, "object": "response", "created_at": int(time.time())}
        envelope |= {"model": body.chat.delivery.model, "error": None, "incomplete_details": None}
        envelope |= NOTHING_STORED | body.echoed
        answer = ResponseAnswer(envelope, body.chat, service.tokenizer)
        chat = body.chat
        return await service.deliver(request, request_id, chat.delivery, answer, [chat.token_ids], [chat.sampling])

    return router
