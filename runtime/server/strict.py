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
    """No unknown fields, no conversions between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def read_numbers(cls, data: Any) -> Any:
        return {name: whole_numbers(value) for name, value in data.items()} if isinstance(data, dict) else data


def contradiction(message: str) -> PydanticCustomError:
    """An error about a field that fits its type, but not what stands beside it."""
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})
