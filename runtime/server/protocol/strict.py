"""The base of all bodies: unknown and unsupported fields are refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

NEST = {float, list}


def whole_numbers(value: Any, depth: int = 2) -> Any:
    """Converts integral floats to integers, in lists and lists of lists too: JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if depth and isinstance(value, list) and not NEST.isdisjoint(map(type, value)):
        return [whole_numbers(item, depth - 1) for item in value]
    return value


def boolean(value: Any) -> Any:
    """Refuses 0 and 1, which equal the literals False and True."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError("is a number, not a boolean")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(boolean)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(boolean)]


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


def at_most(limit: int) -> BeforeValidator:
    """Refuses longer lists before their items are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"has {len(value)} items, and at most {limit} are allowed")
        return value

    return BeforeValidator(check)
