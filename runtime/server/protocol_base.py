"""The base of everything that a body may hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

CONTRADICTION = "contradiction"


def whole_numbers(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is the integer 5, in lists too."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return [whole_numbers(item) for item in value] if isinstance(value, list) else value


class Strict(BaseModel):
    """No unknown fields, no conversions between types, no NaN.

    A field that is null asks for nothing, so even an unknown one may be: clients write out what they leave open, and
    send answers back with all the fields that their own classes have.
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
    """An error about a field that fits its type, but not what stands beside it."""
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})
