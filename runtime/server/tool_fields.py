"""What a chat request says about tools: which there are, whether to call them, and calls of earlier turns."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from runtime.server.strict import Strict, contradiction

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
        """What templates are given."""
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
