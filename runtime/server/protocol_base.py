"""Base model of request bodies: strict, without unknown fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

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
