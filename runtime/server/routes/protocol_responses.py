"""Body of `/v1/responses`: a conversation as a list of items, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from runtime.core.request import MAX_SEED, MAX_TOP_K
from runtime.server.protocol.accepted_fields import AcceptedFields
from runtime.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    REASONING,
    Name,
    check_arguments,
    check_parameters,
    joined_texts,
)
from runtime.server.protocol.generation import WHITESPACE, contradiction
from runtime.server.protocol.strict import OnlyFalse, Strict, at_most

LOGPROBS = "message.output_text.logprobs"


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any] | None, Field(max_length=MAX_PARTS)] = None
    logprobs: Annotated[list[Any] | None, Field(max_length=2**20)] = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]
Parts = Annotated[list[Part], at_most(MAX_PARTS), Field(max_length=MAX_PARTS)]
TextOrParts = Annotated[
    Annotated[str, Tag("a text")] | Annotated[Parts, Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "a text"),
]


class Item(Strict):
    """Holds what all items of a conversation may have, so that those of answers can be sent back."""

    id: str | None = Field(None, description="changes nothing")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description="changes nothing")


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="changes nothing")


class FunctionCallItem(Item):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, BeforeValidator(check_arguments)] = Field(description="a JSON object, as text")

    def as_chat(self) -> dict[str, Any]:
        called = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": called}


class FunctionOutputItem(Item):
    """Holds what a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """Holds what the model thought in an earlier turn."""

    type: Literal["reasoning"]
    summary: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_PARTS)] = None
    content: Annotated[list[ReasoningText] | None, Field(max_length=MAX_PARTS)] = None
    encrypted_content: str | None = None


def kind_of(item: Any) -> Any:
    """Returns the type of an item; one without a type is a message."""
    found = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if found is None else found


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(kind_of),
]
Items = Annotated[list[AnyItem], at_most(MAX_MESSAGES), Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(check_parameters)] = Field(
        None, description="a JSON schema of an object"
    )
    strict: bool | None = Field(None, description="every call follows the schema; forced ones do in any case")

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunction(Strict):
    type: Literal["function"]
    name: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(Strict):
    """Some of the tools; the prompt has no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], at_most(MAX_TOOLS), Field(min_length=1, max_length=MAX_TOOLS)]

    def as_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": self.type, "allowed_tools": allowed}


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> TextFormat:
        if {self.name is not None, self.definition is not None} != {self.type == "json_schema"}:
            raise contradiction('name and schema must be given with type "json_schema", and only with it')
        return self

    def as_chat(self) -> dict[str, Any]:
        if self.definition is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.definition}}


class TextOptions(Strict):
    format: TextFormat | None = Field(None, description="what the answer is")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="changes nothing")


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="as reasoning_effort of chats"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="no summary is made")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="no summary is made")


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = Field(None, description="changes nothing: streams are not padded")


class ResponsesRequest(AcceptedFields):
    """Body of `/v1/responses`. Nothing is stored: every request has the whole conversation."""

    model: str
    input: Annotated[
        Annotated[str, Tag("a text")] | Annotated[Items, Tag("items")],
        Discriminator(lambda value: "items" if isinstance(value, list) else "a text"),
    ]
    instructions: str | None = Field(None, description="a message of the system before the others")
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="0 and -1 are off")
    seed: int | None = Field(None, ge=-MAX_SEED - 1, lt=MAX_SEED + 1)
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None, Field(max_length=2)
    ] = Field(None, description="log-probabilities are reported where the answer has no tools")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="only with include")
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="nothing is truncated: a prompt longer than the context is refused"
    )
    background: OnlyFalse | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = Field(None, description="written to the server's log with the request's id")
    disable_any_whitespace: bool | None = WHITESPACE

    @model_validator(mode="after")
    def check_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f'top_logprobs is allowed only together with include=["{LOGPROBS}"]')
        if self.wants_logprobs and self.tools:
            raise ValueError("log-probabilities are not reported together with tools; leave one of them out")
        return self

    @model_validator(mode="after")
    def check_input(self) -> ResponsesRequest:
        if not isinstance(self.input, str) and all(isinstance(item, ReasoningItem) for item in self.input):
            raise ValueError("input has nothing but reasoning; add a message, a call or the output of one")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def ignored(self) -> dict[str, str]:
        """Fields that are not followed, with the reason."""
        return {"truncation": "nothing is truncated"} if self.truncation == "auto" else {}

    def as_chat(self) -> dict[str, Any]:
        """Returns the fields of the chat request that this stands for."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        names = ["model", "stream", "temperature", "top_p", "top_k", "seed", "user", "top_logprobs"]
        found: dict[str, Any] = {name: getattr(self, name) for name in [*names, "disable_any_whitespace"]}
        said = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        found |= {"messages": [*system, *said], "logprobs": self.wants_logprobs or None}
        found |= {"max_tokens": self.max_output_tokens}
        if self.reasoning is not None:
            found["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            found["response_format"] = self.text.format.as_chat()
        if self.tools:
            choice = self.tool_choice if isinstance(self.tool_choice, str | None) else self.tool_choice.as_chat()
            found |= {"tools": [tool.as_chat() for tool in self.tools], "tool_choice": choice}
            found["parallel_tool_calls"] = self.parallel_tool_calls
        return found

    @model_validator(mode="after")
    def check_choice(self) -> ResponsesRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice is allowed only together with tools")
        return self


def messages_of(items: Sequence[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem]) -> list[Any]:
    """Returns the messages of a chat: calls are part of the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    thought: dict[str, str] = {}  # goes into the assistant's next message
    for item in items:
        if isinstance(item, MessageItem):
            reasoning = thought if item.role == "assistant" else {}
            messages.append({"role": item.role, "content": joined_texts(item.content), **reasoning})
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_texts(item.output)})
        elif isinstance(item, FunctionCallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None, **thought})
            messages[-1].setdefault("tool_calls", []).append(item.as_chat())
        thought = {}
        if isinstance(item, ReasoningItem) and item.content:
            thought = {REASONING: "".join(part.text for part in item.content)}
    return messages
