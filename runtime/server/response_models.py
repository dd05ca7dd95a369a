"""The objects that answers are made of, as OpenAI's API defines them.

The published description is generated from these types. Answers are plain dictionaries of them, so nothing is validated
when one is written: a stream pays only for its JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from math import isfinite
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


@with_config(ConfigDict(extra="forbid"))
class Closed(TypedDict):
    """An object with exactly the keys of its type."""


FinishReason = Literal["stop", "length"]


class CachedTokens(Closed):
    """Prompt tokens whose keys and values were found in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Closed):
    """Tokens of an answer's reasoning, which the count of its tokens has, too."""

    reasoning_tokens: int


class Usage(Closed):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


class CompletionLogprobs(Closed):
    """Log-probabilities of a completion's tokens; offsets count characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Closed):
    """A token that could stand in a prompt; one that is not among the alternatives has no rank."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The alternatives to each token of a prompt by token id; the first token has none."""


class CompletionChoice(Closed):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionResponse(Closed):
    """Answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Closed):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Closed):
    """A token, and the alternatives to it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Closed):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Closed):
    """Name and arguments (JSON as text) of a call."""

    name: str
    arguments: str


class ToolCall(Closed):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Closed):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Closed):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletionResponse(Closed):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class Embedding(Closed):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Closed):
    """Token counts of inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Closed):
    """Answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedText(Closed):
    """A document."""

    text: str


class RankedDocument(Closed):
    """One of the best documents, by its place in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class RerankResponse(Closed):
    """Answer of `/v1/rerank`, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class Score(Closed):
    """Score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Closed):
    """Answer of `/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Model(Closed):
    """The served model, or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(Closed):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class StartPosition(Closed):
    """Position of a start: `done` of `total` parts of a stage (0 of 0 if they cannot be counted), and its seconds so
    far."""

    stage: str
    done: int
    total: int
    seconds: float


class HealthResponse(Closed):
    """Answer of `/health`: numbers of sequences, and the reason when the server should get no requests."""

    status: Literal["ok", "starting", "unhealthy", "draining"]
    reason: str
    running: int
    waiting: int
    progress: NotRequired[StartPosition]


class VersionResponse(Closed):
    """Answer of `/version`."""

    version: str


class TokenizeResponse(Closed):
    """Answer of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class DetokenizeResponse(Closed):
    """Answer of `/detokenize`."""

    prompt: str


class ErrorObject(Closed):
    """A refusal or failure; `param` names the request field it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class MessageUsage(Closed):
    """Token counts in Anthropic's form; tokens found in the prefix cache count apart."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnswerTextBlock(Closed):
    """Text of a message."""

    type: Literal["text"]
    text: str


class AnswerThinkingBlock(Closed):
    """Reasoning of the model; its signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUseBlock(Closed):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageResponse(Closed):
    """Answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerThinkingBlock | AnswerTextBlock | AnswerToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountResponse(Closed):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ErrorResponse(Closed):
    """Answer of any route when it refuses or fails; `type` is of routes of Anthropic's API."""

    type: NotRequired[Literal["error"]]
    error: ErrorObject


Responses = dict[int | str, dict[str, Any]]
SCHEMAS = "#/components/schemas/{model}"
"""Reference to the schema of a type in the description."""


def _errors(**descriptions: str) -> Responses:
    """Error answers by status, given as `status_404="..."`. They name their schema, since FastAPI would build one for
    each of them at the start."""
    content = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=ErrorResponse.__name__)}}}
    return {
        int(name.removeprefix("status_")): {"description": text, "content": content}
        for name, text in descriptions.items()
    }


# Names in braces are fields of `Limits`.
ANY_ERRORS = _errors(
    status_403="Asked by a page of another site, or under a foreign host name",
    status_413="The body is longer than {max_body_bytes} bytes",
    status_415="The body is compressed",
    status_500="The server failed",
)
"""Errors of every route."""
KEY_ERRORS = _errors(status_401="Missing or incorrect API key")
DRAIN_ERRORS = _errors(status_503="The server is stopping")
PARAMETER_ERRORS = _errors(status_404="Not found")
BODY_ERRORS = _errors(
    status_400="The body is invalid or exceeds the context of {max_model_len} tokens; `param` names the field",
    status_404="Another model is served",
    status_408="The body was not complete after {client_seconds:g} s",
    status_429="{max_requests} sequences of the client run or wait, the queue is full, or its API key has no more",
    status_503="The server is stopping, or the request got no token in {queue_seconds:g} s",
    status_504="The request took longer than {request_seconds:g} s",
)
MAY_STREAM: Responses = BODY_ERRORS | {
    200: {
        "description": "The answer; if requested, a stream of server-sent events: chunks in JSON, then [DONE]",
        "content": {"text/event-stream": {}},
    }
}
ITEMS_AT_ONCE = 64


to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Returns JSON in ASCII, which can hold text with lone surrogates; NaN and infinity raise ValueError."""


def json_pieces(value: Any) -> Iterator[str]:
    """Yields JSON in short pieces. Iterators become arrays, written as they go on; nothing else may be long."""
    if isinstance(value, Iterator):
        yield "["
        separator = ""
        while items := list(islice(value, ITEMS_AT_ONCE)):
            for piece in _array_pieces(items):
                yield separator
                yield from piece
                separator = ","
        yield "]"
    elif isinstance(value, dict) and _has_iterator(value):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{to_json(name)}:"
            yield from json_pieces(item)
        yield "}"
    else:
        yield to_json(value)


def _has_iterator(value: dict[str, Any]) -> bool:
    return any(_has_iterator(item) if isinstance(item, dict) else isinstance(item, Iterator) for item in value.values())


def _array_pieces(items: list[Any]) -> Iterator[Iterable[str]]:
    """Yields the pieces of one or several items: numbers and texts are written together."""
    if any(isinstance(item, dict | Iterator) for item in items):
        yield from map(json_pieces, items)
    else:
        yield (to_json(items)[1:-1],)


LOWEST_LOGPROB = -9999.0


def json_number(logprob: float) -> float:
    """Returns a finite log-probability: JSON has no infinity, so impossible tokens get the value of OpenAI's API."""
    return max(logprob, LOWEST_LOGPROB) if isfinite(logprob) else LOWEST_LOGPROB


def token_text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
