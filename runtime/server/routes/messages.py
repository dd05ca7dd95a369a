"""`/v1/messages` and `/v1/messages/count_tokens`: chats in Anthropic's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason
from runtime.server.answers import Answer, Deltas, FramedPart, Frames, each, named_event, text_json
from runtime.server.conversation import conversation_texts
from runtime.server.errors import ApiError, JsonResponse, renaming
from runtime.server.intake import ServedText, described
from runtime.server.protocol.chat import ChatRequest
from runtime.server.response_models import BODY_ERRORS, MAY_STREAM, CountResponse, MessageResponse
from runtime.server.routes.chat import PreparedChat, prepare_conversation
from runtime.server.routes.protocol_messages import CountRequest, MessagesRequest
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Service
from runtime.text.answer_form import AnswerForm
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning, calls_of, joined

EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


@dataclass
class MessageAnswer(Answer):
    """Writes one answer as Anthropic's message, whole or as its events.

    Attributes:
        envelope: `id`, and `model`.
    """

    envelope: dict[str, Any]
    prepared: PreparedChat

    def __post_init__(self) -> None:
        self.parser, self.writer = self.prepared.form.parser(), BlockWriter(self.prepared.form)

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        output = Delta(self.envelope["id"])
        async for delta in each(deltas):
            output.append(delta)
        blocks = list(self.blocks([*self.parser.push(output.text), *self.parser.flush()]))
        return {**self.message(output), "content": blocks, **self.ending(output)}

    def begin(self, first: Delta) -> bytes:
        return named_event("message_start", message={**self.message(first), "content": [], **self.ending(None)})

    def write(self, delta: Delta) -> bytes:
        ends = delta.finish_reason is not None
        pieces = [*self.parser.push(delta.text), *(self.parser.flush() if ends else ())]
        written = [event for piece in self.prepared.form.shown(pieces) for event in self.writer.events(piece)]
        if ends:
            usage = {"output_tokens": delta.num_output_tokens}
            written += [*self.writer.end(), named_event("message_delta", delta=self.ending(delta), usage=usage)]
        return b"".join(written)

    def end(self, error: ApiError | None) -> bytes:
        if error is None:
            return named_event("message_stop")
        return named_event("error", error={"type": "api_error", "message": error.detail})

    def message(self, delta: Delta) -> dict[str, Any]:
        cached = delta.num_cached_tokens
        usage = {
            "input_tokens": delta.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": delta.num_output_tokens,
        }
        return {**self.envelope, "type": "message", "role": "assistant", "usage": usage}

    def ending(self, last: Delta | None) -> dict[str, Any]:
        """Returns why the message ended, as far as it has."""
        if last is None or last.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = STOP_REASONS.get(last.finish_reason, "end_turn")
        if reason == "end_turn" and self.parser.num_calls:
            reason = "tool_use"
        elif last.stop_string:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": last.stop_string or None}

    def blocks(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Yields the blocks of a whole message."""
        calls = enumerate(calls_of(pieces))
        for piece in joined(self.prepared.form.shown(pieces)):
            if isinstance(piece, str):
                yield {"type": "text", "text": piece}
            elif isinstance(piece, Reasoning):
                yield {**EMPTY_THINKING, "thinking": piece.text}
            elif isinstance(piece, CallStart):
                number, (start, arguments) = next(calls)
                yield {**tool_use(self.prepared.form, number, start), "input": input_of(arguments)}


@dataclass
class BlockWriter:
    """Writes the events of blocks.

    Attributes:
        number: index of the block that is open; -1 before the first.
        kind: type of what is in it.
        num_calls: calls so far.
    """

    form: AnswerForm
    number: int = -1
    kind: type[Piece] | None = None
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.frames = Frames(lambda delta: named_event("content_block_delta", index=self.number, delta=delta))

    def events(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, CallStart):
            yield from self.begin(piece, {**tool_use(self.form, self.num_calls, piece), "input": {}})
            self.num_calls += 1
        elif isinstance(piece, CallArguments):
            yield self.delta(piece.text, "input_json_delta", "partial_json")
        elif isinstance(piece, Reasoning):
            if self.kind is not Reasoning:
                yield from self.begin(piece, EMPTY_THINKING)
            yield self.delta(piece.text, "thinking_delta", "thinking")
        else:
            if self.kind is not str:
                yield from self.begin(piece, {"type": "text", "text": ""})
            yield self.delta(piece, "text_delta", "text")

    def delta(self, text: str, kind: str, name: str) -> bytes:
        """Returns the event of a text in the block that is open."""
        return self.frames.fill(FramedPart(self.number, (text_json(text),), lambda text: {"type": kind, name: text}))

    def begin(self, piece: Piece, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.end()
        self.number, self.kind = self.number + 1, type(piece)
        yield named_event("content_block_start", index=self.number, content_block=block)

    def end(self) -> Iterator[bytes]:
        if self.number >= 0:
            yield named_event("content_block_stop", index=self.number)


def tool_use(form: AnswerForm, number: int, start: CallStart) -> dict[str, Any]:
    return {"type": "tool_use", "id": form.new_id(start.name, number), "name": start.name}


def input_of(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; of arguments that were cut off or are not JSON, as much as can be read."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def prepare_message(served: ServedText, raw: bytes) -> PreparedChat:
    """As `prepare_chat`."""
    body = served.parse(raw, MessagesRequest)
    with renaming(**FIELD_NAMES):
        return prepare_conversation(served, as_chat(served, body), FIELD_NAMES, **body.ignored)


def count_tokens(served: ServedText, raw: bytes) -> int:
    """Returns the tokens of a prompt. Raises ApiError or RequestError."""
    body = served.parse(raw, CountRequest)
    served.check_model(body.model)
    with renaming(**FIELD_NAMES):
        return len(served.encode_pieces(conversation_texts(served.tokenizer, as_chat(served, body))))


def as_chat(served: ServedText, body: CountRequest) -> ChatRequest:
    """Returns the chat request that a body represents. Raises ApiError."""
    fields = body.as_chat()
    if body.thinking is not None:
        known = [name for name in THINKING_VARIABLES if name in served.tokenizer.template_variables]
        fields["chat_template_kwargs"] = dict.fromkeys(known, body.thinking.is_on)
    return served.validate(fields, ChatRequest)


FIELD_NAMES = {"reasoning_effort": "output_config.effort", "response_format": "output_config.format"}
"""Names of fields in Anthropic's form, by those of chats."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names under which chat templates switch reasoning on and off."""


@register(order=30, bodies=[MessagesRequest, CountRequest])
def messages_router(service: Service) -> APIRouter:
    """Routes of Anthropic's API."""
    router = APIRouter(route_class=PlainRoute)
    options: dict[str, Any] = {"responses": MAY_STREAM, "openapi_extra": described(MessagesRequest)}

    @router.post("/v1/messages", response_model=MessageResponse, **options)
    async def create_message(request: Request) -> Response:
        """Answers a conversation in Anthropic's form."""
        body = await service.intake.read(request, prepare_message)
        request_id = f"msg_{request.state.request_id}"
        answer = MessageAnswer({"id": request_id, "model": body.delivery.model}, body)
        return await service.deliver(request, request_id, body.delivery, answer, [body.token_ids], [body.sampling])

    options = {"responses": BODY_ERRORS, "openapi_extra": described(CountRequest)}

    @router.post("/v1/messages/count_tokens", response_model=CountResponse, **options)
    async def count_message_tokens(request: Request) -> Response:
        """Counts the tokens of a conversation up to the answer."""
        return JsonResponse({"input_tokens": await service.intake.read(request, count_tokens)})

    return router
