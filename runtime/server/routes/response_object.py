"""The objects that answers of `/v1/responses` are made of, as OpenAI's API defines them."""

from __future__ import annotations

from typing import Any, Literal

from runtime.server.response_models import CachedTokens, Closed, ReasoningTokens, TokenLogprob

Status = Literal["completed", "incomplete"]


class OutputMessageText(Closed):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Closed):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputMessageText]


class OutputFunctionCall(Closed):
    """A call of a tool; arguments are JSON as text."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoningText(Closed):
    """Text of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Closed):
    """Holds what the model thought before it answered; no summary is made."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[OutputReasoningText]


class CachedInputTokens(CachedTokens):
    """Prompt tokens whose keys and values were found in the prefix cache, and those that were kept for a price."""

    cache_write_tokens: int


class ResponseUsage(Closed):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedInputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Closed):
    """Reason for which an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Closed):
    """Answer of `/v1/responses`, with what the request said."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    usage: ResponseUsage
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
