"""`/v1/chat/completions`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason, SamplingParams, TokenLogprobs
from runtime.server.conversation import conversation_texts
from runtime.server.intake import ServedText, Tokenizer, described
from runtime.server.protocol import Delivery
from runtime.server.protocol_chat import ChatRequest, Function
from runtime.server.response_models import (
    MAY_STREAM,
    ChatCompletionResponse,
    TokenLogprob,
    TopLogprob,
    json_number,
    token_text,
)
from runtime.server.serving import Service
from runtime.text.tool_parser import Piece, ToolCall, ToolCallParser
from runtime.text.tools import ToolFormat, allowed_calls, find_format, forced_calls


def chat_logprobs(tokenizer: Tokenizer, pairs: Iterable[tuple[int, TokenLogprobs]]) -> Iterator[TokenLogprob]:
    """Yields the `content` of a chat choice's `logprobs`."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": json_number(logprob), "bytes": list(raw)}

    for token_id, found in pairs:
        yield {**entry(token_id, found.logprob), "top_logprobs": [entry(*alternative) for alternative in found.top]}


@dataclass
class ChatShape:
    """Choices of `chat.completion` objects and their chunks."""

    tokenizer: Tokenizer
    with_logprobs: bool
    num_choices: int
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self.chunk(index, {"role": "assistant", "content": ""}) for index in range(self.num_choices)]

    def prelude(self, index: int, delta: Delta) -> None:
        return None

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs):
            return []
        return [self.chunk(index, {"content": delta.text}, self.write_logprobs(delta))]

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.chunk(index, {}, None, reason)

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def logprobs(self, found: Delta) -> dict[str, Any] | None:
        """Returns log-probabilities whose `content` is an iterator."""
        if not self.with_logprobs:
            return None
        content = chat_logprobs(self.tokenizer, zip(found.token_ids, found.logprobs, strict=True))
        return {"content": content, "refusal": None}

    def write_logprobs(self, found: Delta) -> dict[str, Any] | None:
        logprobs = self.logprobs(found)
        return logprobs and {**logprobs, "content": list(logprobs["content"])}

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def find_tool_format(tokenizer: Tokenizer, body: ChatRequest) -> ToolFormat | None:
    """Returns the format of tool calls; None without tools.

    Raises:
        RequestError: the model's format is not supported.
    """
    return find_format(tokenizer.chat_template or "") if body.usable_tools else None


def call_sampling(
    sampling: SamplingParams, tool_format: ToolFormat, tokenizer: Tokenizer, body: ChatRequest
) -> SamplingParams:
    """Keeps tags of calls in the text, and adds a grammar for required calls and strict tools."""
    grammar = None
    if tools := body.forced_tools:
        described = [tool.function.model_dump(exclude_none=True) for tool in tools]
        grammar = forced_calls(tool_format, described, tokenizer.special_ids, several=body.allows_several_calls)
    elif any(tool.function.strict for tool in body.usable_tools):
        described = [loosely(tool.function) for tool in body.usable_tools]
        grammar = allowed_calls(tool_format, described, tokenizer.special_ids, several=body.allows_several_calls)
    return replace(sampling, skip_special_tokens=False, grammar=grammar)


def loosely(function: Function) -> dict[str, Any]:
    """Returns a tool, with its parameters only if it is strict."""
    parameters = function.parameters if function.strict else {}
    return {"name": function.name} | ({} if parameters is None else {"parameters": parameters})


@dataclass
class ToolShape(ChatShape):
    """Choices of chats with tools. A streamed call is sent in one piece, when it is complete.

    Attributes:
        tool_format: what calls look like in the text.
        several: report more than one call per choice.
    """

    tool_format: ToolFormat = field(kw_only=True)
    several: bool = field(kw_only=True)
    parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        parser = self.parsers.setdefault(index, self.new_parser())
        num_before = parser.num_calls
        content = self.describe(parser.push(delta.text), num_before)
        if not (content or delta.logprobs):
            return []
        return [self.chunk(index, content, self.write_logprobs(delta))]

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        parser = self.parsers.setdefault(index, self.new_parser())
        num_before = parser.num_calls
        content = self.describe(parser.flush(), num_before)
        return self.chunk(index, content, None, called(reason, parser))

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        parser = self.new_parser()
        message = self.describe(parser.push(output.text) + parser.flush(), 0)
        for call in message.get("tool_calls", ()):
            del call["index"]  # only in streams
        choice = super().whole(index, output)
        choice["message"] = {"role": "assistant", "content": None, "refusal": None, **message}
        if not message:
            choice["message"]["content"] = ""
        return choice | {"finish_reason": called(choice["finish_reason"], parser)}

    def new_parser(self) -> ToolCallParser:
        return ToolCallParser(self.tool_format, several=self.several)

    def describe(self, pieces: list[Piece], num_before: int) -> dict[str, Any]:
        """Returns `content` and `tool_calls` of pieces, without empty ones."""
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        described = [self.describe_call(number, call) for number, call in enumerate(calls, start=num_before)]
        return ({"content": text} if text else {}) | ({"tool_calls": described} if described else {})

    def describe_call(self, number: int, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": new_call_id(self.tool_format), "type": "function", "function": function}


def new_call_id(tool_format: ToolFormat) -> str:
    """Returns an id that the templates of the format accept."""
    return uuid4().hex[: tool_format.id_length] if tool_format.id_length else f"call_{uuid4().hex[:24]}"


def called(reason: FinishReason, parser: ToolCallParser) -> str:
    """Returns OpenAI's finish reason: `tool_calls` for a complete answer with calls."""
    return "tool_calls" if parser.num_calls and reason is FinishReason.STOP else reason


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked body of `/v1/chat/completions`.

    Attributes:
        tool_format: what calls look like in the text; None without tools.
        several: report more than one call per choice.
    """

    delivery: Delivery
    token_ids: array[int]
    sampling: SamplingParams
    with_logprobs: bool
    tool_format: ToolFormat | None
    several: bool

    def shape(self, tokenizer: Tokenizer) -> ChatShape:
        common = (tokenizer, self.with_logprobs, self.delivery.num_answers)
        if self.tool_format is None:
            return ChatShape(*common)
        return ToolShape(*common, tool_format=self.tool_format, several=self.several)


def prepare_chat(served: ServedText, raw: bytes) -> PreparedChat:
    """Checks a body, renders its conversation and tokenizes it; templates write special tokens themselves.

    Raises ApiError or RequestError.
    """
    body = served.parse(raw, ChatRequest)
    served.check_model(body.model)
    tokenizer = served.tokenizer
    tool_format = find_tool_format(tokenizer, body)
    token_ids = served.encode_pieces(conversation_texts(tokenizer, body), body.truncate_prompt_tokens)
    bad_words = served.encode_words(body.bad_words or ())
    sampling = body.sampling_params(len(token_ids), served.limits.max_model_len, None, bad_words)
    if tool_format is not None:
        sampling = call_sampling(sampling, tool_format, tokenizer, body)
    return PreparedChat(body.delivery, token_ids, sampling, bool(body.logprobs), tool_format, body.allows_several_calls)


def chat_router(service: Service) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()
    options: dict[str, Any] = {"responses": MAY_STREAM, "openapi_extra": described(ChatRequest)}

    @router.post("/v1/chat/completions", response_model=ChatCompletionResponse, **options)
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation."""
        body = await service.intake.read(request, prepare_chat)
        shape = body.shape(service.tokenizer)
        return await service.respond(request, body.delivery, shape, [body.token_ids], [body.sampling])

    return router
