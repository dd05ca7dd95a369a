"""Body of `/v1/messages`: Anthropic's form of a conversation, and the chat request that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from runtime.core.request import MAX_TOP_K
from runtime.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    REASONING,
    check_parameters,
    joined_texts,
)
from runtime.server.protocol.generation import MAX_STOP_STRINGS, WHITESPACE, contradiction
from runtime.server.protocol.strict import OnlyFalse, Strict, at_most

CacheControl = dict[str, Any] | None
"""Changes nothing: equal prefixes are found without a mark."""
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = Field(default=None, description="changes nothing")
    citations: Annotated[list[Any] | None, Field(max_length=MAX_PARTS)] = Field(
        default=None, description="changes nothing"
    )


class ThinkingBlock(Strict):
    """Reasoning of the model in an earlier turn, for templates that repeat it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="changes nothing")


class RedactedThinkingBlock(Strict):
    """Reasoning that only Anthropic's servers can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="changes nothing")
    cache_control: CacheControl = Field(default=None, description="changes nothing")


class ToolResultBlock(Strict):
    """Holds what a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = Field(default=None, description="changes nothing")


AnyBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Block = Annotated[AnyBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], at_most(MAX_PARTS), Field(min_length=1, max_length=MAX_PARTS)]


Content = Annotated[
    Annotated[str, Tag("a text")] | Annotated[Blocks, Tag("blocks")],
    Discriminator(lambda value: "blocks" if isinstance(value, list) else "a text"),
]
"""A text or blocks; errors are those of the form that was sent."""


OF_ASSISTANT = ("tool_use", "thinking", "redacted_thinking")


class AnthropicMessage(Strict):
    role: Literal["user", "assistant"]
    content: Content

    @model_validator(mode="after")
    def check_roles(self) -> AnthropicMessage:
        misplaced = OF_ASSISTANT if self.role == "user" else ("tool_result",)
        if wrong := next((block.type for block in self.blocks if block.type in misplaced), None):
            raise contradiction(f"messages of role {self.role} have no {wrong} blocks")
        return self

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def as_chat(self) -> Iterator[dict[str, Any]]:
        """Yields the messages of a chat: results of tools are messages of their own, before the text."""
        text = joined_texts(block for block in self.blocks if isinstance(block, TextBlock))
        calls = [call_of(block) for block in self.blocks if isinstance(block, ToolUseBlock)]
        results = [result_of(block) for block in self.blocks if isinstance(block, ToolResultBlock)]
        thoughts = "".join(block.thinking for block in self.blocks if isinstance(block, ThinkingBlock))
        yield from results
        if text or not results:
            reasoning = {REASONING: thoughts} if thoughts else {}
            yield {"role": self.role, "content": text, **reasoning} | ({"tool_calls": calls} if calls else {})


def combined(messages: Sequence[AnthropicMessage]) -> Iterator[AnthropicMessage]:
    """Yields turns: messages of one role in a row are one, as in Anthropic's API; many templates insist on it."""
    for role, group in groupby(messages, key=attrgetter("role")):
        blocks = [block for message in group for block in message.blocks]
        yield AnthropicMessage.model_construct(role=role, content=blocks)


def call_of(block: ToolUseBlock) -> dict[str, Any]:
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
    }


def result_of(block: ToolResultBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined_texts(block.content or "")}


class AnthropicTool(Strict):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(check_parameters)] = Field(
        description="a JSON schema of an object"
    )
    strict: bool | None = Field(None, description="every call follows the schema; forced ones do in any case")
    eager_input_streaming: bool | None = Field(None, description="changes nothing: inputs always are streamed")
    defer_loading: OnlyFalse | None = Field(None, description="tools are always in the prompt")
    cache_control: CacheControl = Field(default=None, description="changes nothing")

    def as_chat(self) -> dict[str, Any]:
        schema, strict = self.input_schema, self.strict
        named = {"name": self.name, "description": self.description, "parameters": schema, "strict": strict}
        return {"type": "function", "function": named}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(default=None, description="with type tool only")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise contradiction("name must be given with type tool, and only with it")
        return self

    def as_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class Metadata(Strict):
    user_id: str | None = Field(None, max_length=256, description="written to the server's log")


class Thinking(Strict):
    """Whether reasoning is part of the answer, and whether templates that can switch it do."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1024, description="with type enabled only; max_tokens is the limit here")

    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves reasoning out; no summary is made of it"
    )

    @model_validator(mode="after")
    def check_budget(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise contradiction("budget_tokens must be given with type enabled, and only with it")
        return self

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"

    @property
    def is_shown(self) -> bool:
        return self.is_on and self.display != "omitted"


class OutputFormat(Strict):
    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="as reasoning_effort of chats"
    )
    format: OutputFormat | None = Field(None, description="what the answer is")

    def as_chat(self) -> dict[str, Any]:
        if self.format is None:
            return {"reasoning_effort": self.effort}
        named = {"name": "answer", "schema": self.format.definition}
        form = {"type": "json_schema", "json_schema": named}
        return {"reasoning_effort": self.effort, "response_format": form}


class CountRequest(Strict):
    """Body of `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[AnthropicMessage], at_most(MAX_MESSAGES), Field(min_length=1, max_length=MAX_MESSAGES)] = (
        Field(description="if the last one is the assistant's, the answer continues it")
    )
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], at_most(MAX_TOOLS), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(
        None, description="without it the template decides whether the model thinks, and the answer leaves it out"
    )
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = Field(
        None, description="changes nothing: the prompt is the whole conversation"
    )
    cache_control: CacheControl = Field(default=None, description="changes nothing")

    @property
    def ignored(self) -> dict[str, str]:
        """Fields that are not followed, with the reason."""
        is_asked = self.context_management and self.context_management.get("edits")
        return {"context_management": "nothing is left out of the conversation"} if is_asked else {}

    def as_chat(self) -> dict[str, Any]:
        """Returns the fields of the chat request that this stands for."""
        system = [] if self.system is None else [{"role": "system", "content": joined_texts(self.system)}]
        messages = [*system, *(chat for turn in combined(self.messages) for chat in turn.as_chat())]
        continues = messages[-1]["role"] == "assistant" and bool(messages[-1]["content"])
        shows = self.thinking is not None and self.thinking.is_shown
        found: dict[str, Any] = {"model": self.model, "messages": messages, "include_reasoning": shows}
        found["continue_final_message"] = continues or None
        if self.output_config is not None:
            found |= self.output_config.as_chat()
        if self.tools:
            choice = self.tool_choice or ToolChoice(type="auto")
            found |= {"tools": [tool.as_chat() for tool in self.tools], "tool_choice": choice.as_chat()}
            found["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        return found

    @model_validator(mode="after")
    def check_choice(self) -> CountRequest:
        if self.tool_choice is not None and self.tool_choice.type not in ("none", "auto") and not self.tools:
            raise ValueError("tool_choice is allowed only together with tools")
        return self


class MessagesRequest(CountRequest):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]] | None, at_most(MAX_STOP_STRINGS)] = Field(
        None, max_length=MAX_STOP_STRINGS
    )
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="changes nothing")
    inference_geo: str | None = Field(None, description="changes nothing")
    speed: Literal["standard"] | None = Field(None, description="changes nothing")
    disable_any_whitespace: bool | None = WHITESPACE

    def as_chat(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "disable_any_whitespace")
        user = None if self.metadata is None else self.metadata.user_id
        given = {name: getattr(self, name) for name in names}
        return {**super().as_chat(), **given, "stop": self.stop_sequences, "user": user}
