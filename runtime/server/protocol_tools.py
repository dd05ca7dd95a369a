"""Strict bodies, structured outputs and tools: fields of OpenAI (`response_format`, `tools`) and vLLM (`guided_*`)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from runtime.core.request import Grammar, GrammarKind

CONTRADICTION = "contradiction"


def whole_numbers(value: Any) -> Any:
    """Converts integral floats to integers, in lists too: JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return [whole_numbers(item) for item in value] if isinstance(value, list) else value


class Strict(BaseModel):
    """Base model without unknown fields, conversions between types and NaN.

    An unknown field may be null: some clients send all fields of their classes, also those without a value.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: whole_numbers(value) for name, value in data.items() if value is not None or name in known}


def contradiction(message: str) -> PydanticCustomError:
    """Returns an error about a field that contradicts another one."""
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})


Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=1000)]


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
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.definition is None:
            return Grammar(GrammarKind.JSON_OBJECT)
        return schema_grammar(self.json_schema.definition)


class StructuredOutputs(Strict):
    """One of four constraints on an answer."""

    definition: Schema | None = Field(None, alias="json", description="a JSON schema, as an object or as text")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="in llguidance's form of Lark")

    def named(self) -> dict[str, Grammar]:
        return grammars(("json", "regex", "choice", "grammar"), self.definition, self.regex, self.choice, self.grammar)


class StructuredFields(Strict):
    """Fields that constrain the answer, of which at most one may be given."""

    guided_json: Schema | None = Field(None, description="a JSON schema, as an object or as text")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="in llguidance's form of Lark")
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def check_one_form(self) -> StructuredFields:
        found = list(self.forms())
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} exclude each other: an answer can have one form only; give one")
        return self

    @property
    def grammar(self) -> Grammar | None:
        return next(iter(self.forms().values()), None)

    def forms(self) -> dict[str, Grammar]:
        """Grammars by the name of the field that asks for them."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        found = grammars(names, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        nested = self.structured_outputs.named() if self.structured_outputs else {}
        return found | {f"structured_outputs.{name}": grammar for name, grammar in nested.items()}


def grammars(
    names: tuple[str, ...], schema: Schema | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> dict[str, Grammar]:
    """Grammars by name, of those that are given."""
    found = (
        None if schema is None else schema_grammar(schema),
        None if regex is None else Grammar(GrammarKind.REGEX, regex),
        None if choice is None else choice_grammar(choice),
        None if lark is None else Grammar(GrammarKind.LARK, lark),
    )
    return {name: grammar for name, grammar in zip(names, found, strict=True) if grammar is not None}


def schema_grammar(schema: Schema) -> Grammar:
    """JSON that a schema allows."""
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {' | '.join(quoted)}")


MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def check_parameters(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise contradiction('arguments are always an object, so the schema must have "type": "object"')
    return value


def check_arguments(value: Any) -> Any:
    """Arguments are text, and templates want the object in it."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else {}
    except (ValueError, RecursionError) as error:
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


class FunctionCall(Strict):
    name: str
    arguments: Annotated[str, BeforeValidator(check_arguments)] = Field(description="a JSON object, as text")


class AssistantCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def as_json(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ToolFields(Strict):
    """The fields of a chat request about tools."""

    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name; give each its own")
        if not names and (self.tool_choice not in (None, "none") or self.parallel_tool_calls is not None):
            raise ValueError("tool_choice and parallel_tool_calls are allowed only together with tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names '{self.tool_choice.function.name}', which is not among the tools")
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """Tools of which the answer must call one; none when it need not."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return (self.tools or []) if self.tool_choice == "required" else []

    @property
    def allows_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)
