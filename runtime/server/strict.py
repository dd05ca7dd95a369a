"""The base of everything that a body may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

CONTRADICTION = "contradiction"


class Strict(BaseModel):
    """No unknown fields, no conversions between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def contradiction(message: str) -> PydanticCustomError:
    """An error about a field that fits its type, but not what stands beside it."""
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})
