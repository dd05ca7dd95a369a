"""Bodies of chat: messages, tools and `response_format`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from runtime.core.request import Grammar, GrammarKind
from runtime.server.protocol.generation import GenerationRequest, Schema, contradiction, schema_grammar
from runtime.server.protocol.strict import OnlyFalse, Strict, at_most


class JsonSchemaFormat(Strict):
    """A JSON schema. Answers follow it with any value of `strict`."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise contradiction('json_schema must be given with type "json_schema", and only with it')
        return self

    @property
    def definition(self) -> dict[str, Any] | None:
        """Schema of the answer, if there is one."""
        return self.json_schema.definition if self.json_schema else None

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar(GrammarKind.JSON_OBJECT) if self.definition is None else schema_grammar(self.definition)


MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def check_parameters(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise contradiction('arguments are always an object, so the schema must have "type": "object"')
    return value


def read_arguments(text: str) -> Any:
    """Returns the JSON in a text, which templates want; of a call that was cut off, as much as can be read. An empty
    text stands for no arguments.

    Raises:
        ValueError: it is not JSON.
    """
    return from_json(text or "{}", allow_partial=True)


def check_arguments(value: Any) -> Any:
    try:
        parsed = read_arguments(value) if isinstance(value, str) else {}
    except ValueError as error:
        raise contradiction(f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise contradiction("the text must be a JSON object")
    return value


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(check_parameters)] = Field(
        None, description="a JSON schema; without one the function has no parameters"
    )
    strict: bool | None = Field(None, description="every call follows the schema; forced ones do in any case")


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def as_json(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates take."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName

    @property
    def names(self) -> list[str]:
        return [self.function.name]


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], at_most(MAX_TOOLS), Field(min_length=1, max_length=MAX_TOOLS)]


class ToolsChoice(Strict):
    """Some of the tools; the prompt has no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]


class FunctionCall(Strict):
    name: str
    arguments: Annotated[str, BeforeValidator(check_arguments)] = Field(description="a JSON object, as text")


class AssistantCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(None, description="changes nothing: calls of streams have it")

    def as_json(self) -> dict[str, Any]:
        arguments = read_arguments(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ToolFields(Strict):
    """The fields of a chat request about tools. An empty list of them is none."""

    tools: Annotated[list[Tool], at_most(MAX_TOOLS), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ToolsChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name; give each its own")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is allowed only together with tools")
        if unknown := next((name for name in self.chosen_names or () if name not in names), None):
            raise ValueError(f"tool_choice names '{unknown}', which is not among the tools")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """Tools that `tool_choice` names; None if it names none."""
        return self.tool_choice.names if isinstance(self.tool_choice, NamedTool | ToolsChoice) else None

    @property
    def chosen_tools(self) -> list[Tool]:
        """Tools that `tool_choice` names, or all."""
        chosen = self.chosen_names
        return [tool for tool in self.tools or () if chosen is None or tool.function.name in chosen]

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the prompt describes."""
        if isinstance(self.tool_choice, ToolsChoice):
            return self.chosen_tools
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """Tools of which the answer must call one; none when it need not."""
        if isinstance(self.tool_choice, ToolsChoice):
            return self.chosen_tools if self.tool_choice.allowed_tools.mode == "required" else []
        return self.chosen_tools if self.tool_choice == "required" or self.chosen_names else []

    @property
    def allows_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)


class HasText(Protocol):
    """A part of a message."""

    @property
    def text(self) -> str: ...


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="changes nothing: equal prefixes are found")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="changes nothing")


def joined_texts(content: str | Iterable[HasText]) -> str:
    """Returns a text as it is, and those of parts each from a new line, as vLLM and llama.cpp join them."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


PART_FIELDS = frozenset(TextPart.model_fields)
MAX_PARTS = 2048
REASONING = "reasoning_content"
"""Name of a message's reasoning, here and in most templates."""


class Message(Strict):
    """One message. Tool calls are in messages of the assistant, their results in messages of role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(None, description="name of the author or function; templates may omit it")
    tool_calls: list[AssistantCall] | None = Field(None, validate_default=True)
    tool_call_id: str | None = Field(None, validate_default=True)
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = Field(None, validate_default=True)
    reasoning_content: str | None = Field(
        None, validate_default=True, description="what the model thought, for templates that repeat it"
    )
    reasoning: str | None = Field(None, validate_default=True, description="another name of reasoning_content")
    refusal: None = Field(None, description="as in answers, so that they can be sent back unchanged")
    annotations: Annotated[list[Any] | None, Field(max_length=MAX_PARTS)] = Field(
        None, description="changes nothing: answers of other servers have it"
    )

    @field_validator("tool_calls")
    @classmethod
    def check_tool_calls(cls, value: list[AssistantCall] | None, info: ValidationInfo) -> list[AssistantCall] | None:
        if value and info.data.get("role") != "assistant":
            raise contradiction("only messages of the assistant have calls")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def check_tool_call_id(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is not None) != (info.data.get("role") == "tool"):
            raise contradiction("messages of role tool need it, and only they have it")
        return value

    @field_validator("reasoning_content", "reasoning")
    @classmethod
    def check_reasoning(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("role") != "assistant":
            raise contradiction("only messages of the assistant have reasoning")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def check_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            if info.data.get("tool_calls"):
                return None
            raise contradiction("required, unless the message has tool_calls")
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        if len(value) > MAX_PARTS:
            raise ValueError(f"has {len(value)} parts, and at most {MAX_PARTS} are allowed")
        for i, part in enumerate(value):
            given = {key for key, held in part.items() if held is not None} if isinstance(part, dict) else set()
            if not {"type", "text"} <= given <= PART_FIELDS or part["type"] != "text":
                raise ValueError(f'part {i} is not {{"type": "text", "text": "..."}}; other kinds are not supported')
            if not isinstance(part["text"], str):
                raise ValueError(f"the text of part {i} must be a string")
        return value

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return joined_texts(self.content)

    def as_json(self) -> dict[str, Any]:
        """Returns the message for templates: content is text, arguments are objects, `developer` becomes `system`."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        calls = {"tool_calls": [call.as_json() for call in self.tool_calls]} if self.tool_calls else {}
        answer_to = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        thoughts = self.reasoning_content or self.reasoning
        reasoning = {REASONING: thoughts} if thoughts else {}
        return {"role": role, **name, "content": self.text, **reasoning, **calls, **answer_to}


MAX_MESSAGES = 2048
"""As in OpenAI's API."""
Messages = Annotated[list[Message], at_most(MAX_MESSAGES), Field(min_length=1, max_length=MAX_MESSAGES)]

TAKEN_VARIABLES = {"self", "messages", "tools", "add_generation_prompt"}


def check_template_variables(value: Any) -> Any:
    """Validates variables of a chat template: none that the request has other fields for."""
    if isinstance(value, dict) and (taken := sorted(value.keys() & TAKEN_VARIABLES)):
        raise contradiction(f"{taken[0]} cannot be set here")
    return value


class ChatRequest(ToolFields, GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(check_template_variables)] = Field(
        None, description="variables of the model's chat template, such as enable_thinking"
    )
    add_special_tokens: OnlyFalse | None = Field(None, description="chat templates write theirs themselves")
    echo: OnlyFalse | None = Field(None, description="messages are not repeated")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="a variable of the model's chat template; changes nothing where that has none of this name"
    )
    separate_reasoning: bool | None = Field(
        None, description="false leaves reasoning in the content, as it is written; it is apart by default"
    )
    include_reasoning: bool | None = Field(None, description="false leaves reasoning out of the answer")
    add_generation_prompt: bool | None = Field(None, description="begin the assistant's turn; true by default")
    continue_final_message: bool | None = Field(
        None, description="let the answer continue the last message, which is the assistant's"
    )
    parse_special: bool | None = Field(
        None, description="read special tokens in messages as such; they are text by default"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def check_pairs(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            both = f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}"
            raise ValueError(f"{both} disagree; give one")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only together with logprobs=true")
        return self

    @model_validator(mode="after")
    def check_one_effort(self) -> ChatRequest:
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("reasoning_effort is in chat_template_kwargs too; give one")
        return self

    @model_validator(mode="after")
    def check_reasoning_fields(self) -> ChatRequest:
        if self.separate_reasoning is False and self.include_reasoning is False:
            raise ValueError("separate_reasoning=false leaves reasoning in, and include_reasoning=false out; give one")
        return self

    @model_validator(mode="after")
    def check_continuation(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; give one")
        if self.continue_final_message and not (self.messages[-1].role == "assistant" and self.messages[-1].text):
            raise contradiction("continue_final_message needs a last message of the assistant with content")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        begins = self.add_generation_prompt is not False and not self.continue_final_message
        turn = {} if begins else {"add_generation_prompt": False}
        return {**(self.chat_template_kwargs or {}), **effort, **turn}

    @model_validator(mode="after")
    def check_form_of_calls(self) -> ChatRequest:
        if self.usable_tools and (guided := next(iter(super().forms()), None)):
            raise ValueError(f"{guided} and tools exclude each other, unless tool_choice is none")
        return self

    @property
    def schemas(self) -> dict[str, list[Schema]]:
        of_answer = self.response_format.definition if self.response_format else None
        tools = self.forced_tools or [tool for tool in self.usable_tools if tool.function.strict]
        of_tools = [tool.function.parameters for tool in tools if tool.function.parameters is not None]
        return super().schemas | {"response_format": [of_answer] if of_answer else [], "tools": [*of_tools]}

    def forms(self) -> dict[str, Grammar]:
        grammar = self.response_format.grammar if self.response_format else None
        return super().forms() | ({} if grammar is None else {"response_format": grammar})

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
