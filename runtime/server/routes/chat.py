"""`/v1/chat/completions`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason, Grammar, SamplingParams, TokenLogprobs
from runtime.server.answers import HOLE, FramedPart, Part, template_of, text_json
from runtime.server.conversation import conversation_texts
from runtime.server.errors import renaming
from runtime.server.intake import ServedText, described
from runtime.server.prompt_logprobs import write_prompt_logprobs
from runtime.server.protocol.chat import ChatRequest, Function
from runtime.server.protocol.field_warnings import chat_warnings
from runtime.server.protocol.generation import Delivery
from runtime.server.protocol.words import encode_words
from runtime.server.response_models import (
    MAY_STREAM,
    ChatCompletionResponse,
    TokenLogprob,
    TopLogprob,
    json_number,
    to_json,
    token_text,
)
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Service
from runtime.text.answer_form import AnswerForm, AnswerParser, ReasoningCounter, find_reasoning
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning, calls_of, joined
from runtime.text.reasoning import Position, ReasoningFormat
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_format import ToolFormat
from runtime.text.tool_grammar import allowed_calls, forced_calls
from runtime.text.tools import find_format


class TokenFrames(dict[int, str]):
    """The JSON of tokens in `logprobs`, which differs in the log-probability only: the rest is written once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        self[token_id] = template = template_of(to_json(self.token(token_id, HOLE)))
        return template

    def token(self, token_id: int, logprob: Any) -> TopLogprob:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": logprob, "bytes": list(raw)}

    def described(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> Iterator[TokenLogprob]:
        """Yields the `content` of a chat choice's `logprobs`."""
        for token_id, found in pairs:
            top = [self.token(other, json_number(logprob)) for other, logprob in found.top]
            yield {**self.token(token_id, json_number(found.logprob)), "top_logprobs": top}

    def content(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> str:
        """Returns what `described` yields in JSON, separated by commas."""
        written = []
        for token_id, found in pairs:
            top = ",".join([self[other] % json_number(logprob) for other, logprob in found.top])
            written.append(f'{(self[token_id] % json_number(found.logprob))[:-1]},"top_logprobs":[{top}]}}')
        return ",".join(written)


@dataclass
class ChatShape:
    """Choices of `chat.completion` objects and their chunks.

    Attributes:
        scored: the prompt, if its log-probabilities are reported.
    """

    tokenizer: Tokenizer
    with_logprobs: bool
    num_choices: int
    scored: Sequence[int] = ()
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    reasoning: ReasoningCounter | None = None
    frames: TokenFrames = field(init=False)

    def __post_init__(self) -> None:
        self.frames = TokenFrames(self.tokenizer)

    def opening(self) -> list[dict[str, Any]]:
        return [self.chunk(index, {"role": "assistant", "content": ""}) for index in range(self.num_choices)]

    def prelude(self, index: int, delta: Delta) -> None:
        return None

    def beside(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        if not self.scored:
            return {}
        return {"prompt_logprobs": write_prompt_logprobs(self.tokenizer, self.scored, outputs[0].prompt_logprobs)}

    def parts(self, index: int, delta: Delta) -> list[Part]:
        if not (delta.text or delta.logprobs):
            return []
        values = (text_json(delta.text), *self.content(delta))
        return [FramedPart(index, values, lambda text, *found: self.chunk(index, {"content": text}, *found))]

    def content(self, found: Delta) -> tuple[str, ...]:
        """Returns log-probabilities in JSON; nothing if they are not reported."""
        if not self.with_logprobs:
            return ()
        return (f"[{self.frames.content(zip(found.token_ids, found.logprobs, strict=True))}]",)

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.chunk(index, {}, reason=reason)

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def logprobs(self, output: Delta) -> dict[str, Any] | None:
        """Returns log-probabilities whose `content` is an iterator."""
        if not self.with_logprobs:
            return None
        found = zip(output.token_ids, output.logprobs, strict=True)
        return {"content": self.frames.described(found), "refusal": None}

    def chunk(
        self, index: int, delta: dict[str, Any], content: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        """Returns the choice of a chunk; `content` is that of its log-probabilities."""
        logprobs = None if content is None else {"content": content, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def answer_form(tokenizer: Tokenizer, body: ChatRequest, prompt: str) -> AnswerForm:
    """Returns what the text of an answer consists of.

    Args:
        prompt: the end of the rendered conversation.

    Raises:
        RequestError: tools are given, and the model's format of calls is not supported.
    """
    template = tokenizer.chat_template or ""
    tools = [tool.function.model_dump(include={"name", "parameters"}, exclude_none=True) for tool in body.usable_tools]
    reasoning = find_reasoning(template)
    return AnswerForm(
        tool_format=find_format(template) if tools else None,
        tools=tools,
        several=body.allows_several_calls,
        reasoning=reasoning if body.separate_reasoning is not False else None,
        position=position_of(reasoning, body, prompt) if reasoning else Position.AFTER,
        shows_reasoning=body.include_reasoning is not False,
    )


def position_of(reasoning: ReasoningFormat, body: ChatRequest, prompt: str) -> Position:
    """Returns where an answer begins: also in the middle of reasoning that the last message holds."""
    if not body.continue_final_message:
        return reasoning.position(prompt)
    text = body.messages[-1].text
    return Position.INSIDE if text.rfind(reasoning.opening) > text.rfind(reasoning.closing) else Position.AFTER


def form_sampling(
    sampling: SamplingParams, form: AnswerForm, tokenizer: Tokenizer, body: ChatRequest
) -> SamplingParams:
    """Keeps marks of calls and reasoning in the text, and lets grammars begin after reasoning."""
    special_ids = tokenizer.special_ids
    if form.tool_format is not None:
        grammar = call_grammar(form.tool_format, special_ids, body)
        grammar = grammar and replace(grammar, any_whitespace=body.any_whitespace)
        sampling = replace(sampling, skip_special_tokens=False, grammar=grammar)
    if form.reasoning is not None and form.reasoning.uses(special_ids):
        sampling = replace(sampling, skip_special_tokens=False)
    reasoning = find_reasoning(tokenizer.chat_template or "")
    if sampling.grammar is None or reasoning is None:
        return sampling
    prefix = reasoning.prefix(form.position, special_ids, is_call=form.tool_format is not None)
    return replace(sampling, grammar=replace(sampling.grammar, prefix=prefix))


def call_grammar(tool_format: ToolFormat, special_ids: Mapping[str, int], body: ChatRequest) -> Grammar | None:
    """Returns the grammar of required calls, strict tools, and calls or formatted answers; None without them."""
    if tools := body.forced_tools:
        described = [tool.function.model_dump(exclude_none=True) for tool in tools]
        return forced_calls(tool_format, described, special_ids, several=body.allows_several_calls)
    described = [loosely(tool.function) for tool in body.usable_tools]
    if body.response_format and body.response_format.type != "text":
        reply = body.response_format.definition or {"type": "object"}
        return forced_calls(tool_format, described, special_ids, several=body.allows_several_calls, reply=reply)
    if not any(tool.function.strict for tool in body.usable_tools):
        return None
    return allowed_calls(tool_format, described, special_ids, several=body.allows_several_calls)


def loosely(function: Function) -> dict[str, Any]:
    """Returns a tool, with its parameters only if it is strict."""
    parameters = function.parameters if function.strict else {}
    return {"name": function.name} | ({} if parameters is None else {"parameters": parameters})


@dataclass
class ParsedShape(ChatShape):
    """Choices of chats whose text has parts, such as tool calls.

    Reasoning is apart from the content. A call is streamed as it is written: a chunk with its name, and chunks with
    parts of its arguments.
    """

    form: AnswerForm = field(kw_only=True)
    parsers: dict[int, AnswerParser] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form.reasoning is not None:
            self.reasoning = ReasoningCounter(self.form, self.tokenizer.token_bytes)

    def parts(self, index: int, delta: Delta) -> list[Part]:
        parser = self.parsers.setdefault(index, self.form.parser())
        num_before = parser.num_calls
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces = joined([*pieces, *parser.flush()])
        shown: list[tuple[int, Piece | None]] = [*numbered(self.form.shown(pieces), num_before)]
        if not shown and delta.logprobs:
            shown = [(0, None)]
        contents = chain([self.content(delta)], repeat(()))  # log-probabilities stand with the first piece
        return [self.part(index, *piece, content) for piece, content in zip(shown, contents, strict=False)]

    def part(self, index: int, number: int, piece: Piece | None, content: tuple[str, ...]) -> Part:
        """Returns the choice of one piece; `content` is that of its log-probabilities."""
        key = (index, number, type(piece), len(content))
        if piece is None or isinstance(piece, CallStart):
            return FramedPart(key, content, lambda *found: self.chunk(index, self.describe(number, piece), *found))
        kind, values = type(piece), (text_json(piece if isinstance(piece, str) else piece.text), *content)
        return FramedPart(
            key, values, lambda text, *found: self.chunk(index, self.describe(number, kind(text)), *found)
        )

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.chunk(index, {}, reason=called(reason, self.parsers[index].num_calls))

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        parser = self.form.parser()
        pieces = [*parser.push(output.text), *parser.flush()]
        choice = super().whole(index, output)
        choice["message"] |= message_fields(self.form, pieces)
        return choice | {"finish_reason": called(choice["finish_reason"], parser.num_calls)}

    def describe(self, number: int, piece: Piece | None) -> dict[str, Any]:
        """Returns the delta of one piece; `number` is that of the call it belongs to."""
        if piece is None:
            return {}
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": number, "function": {"arguments": piece.text}}]}
        return {"tool_calls": [{"index": number, **written_call(self.form, number, piece, "")}]}


def numbered(pieces: Iterable[Piece], num_calls: int) -> Iterator[tuple[int, Piece]]:
    """Yields pieces with the number of the last call; `num_calls` began before."""
    for piece in pieces:
        num_calls += isinstance(piece, CallStart)
        yield num_calls - 1, piece


def message_fields(form: AnswerForm, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Returns `content`, `reasoning_content` and `tool_calls` of a message; content is null where there are calls
    only."""
    pieces = form.shown(pieces)
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = [written_call(form, number, *call) for number, call in enumerate(calls_of(pieces))]
    found: dict[str, Any] = {"content": text or (None if calls else "")}
    return found | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def written_call(form: AnswerForm, number: int, start: CallStart, arguments: str) -> dict[str, Any]:
    call = {"name": start.name, "arguments": arguments}
    return {"id": form.new_id(start.name, number), "type": "function", "function": call}


def called(reason: FinishReason, num_calls: int) -> str:
    """Returns OpenAI's finish reason: `tool_calls` for a complete answer with calls."""
    return "tool_calls" if num_calls and reason is FinishReason.STOP else reason


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked body of `/v1/chat/completions`; `form` is what the text of the answer consists of."""

    delivery: Delivery
    token_ids: array[int]
    sampling: SamplingParams
    with_logprobs: bool
    form: AnswerForm

    def shape(self, tokenizer: Tokenizer) -> ChatShape:
        scored = () if self.sampling.prompt_logprobs is None else self.token_ids
        common = (tokenizer, self.with_logprobs, self.delivery.num_answers, scored)
        return ChatShape(*common) if self.form.is_plain else ParsedShape(*common, form=self.form)


def prepare_chat(served: ServedText, raw: bytes) -> PreparedChat:
    """Checks a body and prepares its conversation. Raises ApiError or RequestError."""
    body = served.parse(raw, ChatRequest)
    with renaming(max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"):
        return prepare_conversation(served, body)


def prepare_conversation(
    served: ServedText, body: ChatRequest, names: Mapping[str, str] = MappingProxyType({}), **ignored: str
) -> PreparedChat:
    """Renders a conversation and tokenizes it; templates write special tokens themselves.

    Args:
        names: names that fields have in the body of the route, by their names in chats.
        ignored: what else is not followed, by field.

    Raises:
        ApiError: the body asks for something that is not served.
        RequestError: the template refuses the conversation.
    """
    served.check_model(body.model)
    tokenizer = served.tokenizer
    texts = conversation_texts(tokenizer, body)
    form = answer_form(tokenizer, body, texts[-1])
    token_ids = served.encode_pieces(texts, body.truncate_prompt_tokens)
    words = encode_words(tokenizer, body.bad_words or (), body.breakers)
    sampling = body.sampling_params(len(token_ids), served.limits.max_model_len, None, words)
    sampling = form_sampling(sampling, form, tokenizer, body)
    found = chat_warnings(body, tokenizer.template_variables)
    warnings = {names.get(name, name): text for name, text in found.items()} | ignored
    return PreparedChat(replace(body.delivery, warnings=warnings), token_ids, sampling, bool(body.logprobs), form)


@register(order=20, bodies=[ChatRequest])
def chat_router(service: Service) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter(route_class=PlainRoute)
    options: dict[str, Any] = {"responses": MAY_STREAM, "openapi_extra": described(ChatRequest)}

    @router.post("/v1/chat/completions", response_model=ChatCompletionResponse, **options)
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation."""
        body = await service.intake.read(request, prepare_chat)
        shape = body.shape(service.tokenizer)
        return await service.respond(request, body.delivery, shape, [body.token_ids], [body.sampling])

    return router
