"""The messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from runtime.server.strict import Strict, contradiction
from runtime.server.tool_fields import AssistantCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn. What the model called stands in an assistant's message; what came of it in one of role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(None, description="of who speaks, or of the function; templates may leave it out")
    tool_calls: Annotated[list[AssistantCall], Field(min_length=1)] | None = Field(None, validate_default=True)
    tool_call_id: str | None = Field(None, validate_default=True)
    content: str | list[TextPart] | None = Field(None, validate_default=True)
    refusal: None = Field(None, description="as answers have it, so that they can be sent back as they came")

    @field_validator("tool_calls")
    @classmethod
    def check_tool_calls(cls, value: list[AssistantCall] | None, info: ValidationInfo) -> list[AssistantCall] | None:
        if value is not None and info.data.get("role") != "assistant":
            raise contradiction("only messages of the assistant have calls")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def check_tool_call_id(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is not None) != (info.data.get("role") == "tool"):
            raise contradiction("messages of role tool need it, and only they have it")
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
        for i, part in enumerate(value):
            given = {key for key, held in part.items() if held is not None} if isinstance(part, dict) else set()
            if given != {"type", "text"} or part["type"] != "text":
                raise ValueError(f'part {i} is not {{"type": "text", "text": "..."}}; other kinds are not supported')
            if not isinstance(part["text"], str):
                raise ValueError(f"the text of part {i} must be a string")
        return value

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def as_json(self) -> dict[str, Any]:
        """What templates are given: content is always text, arguments are objects, and who was `system` in older models
        is so for all."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        calls = {"tool_calls": [call.as_json() for call in self.tool_calls]} if self.tool_calls else {}
        answer_to = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": role, **name, "content": self.text, **calls, **answer_to}
