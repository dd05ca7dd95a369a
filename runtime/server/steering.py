"""Fields of a request that push its answers towards tokens or away from them, and that say how it is served."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from runtime.server.strict import Strict
from runtime.types import MAX_PRIORITY

MAX_BIAS = 100
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")

TOKEN_IDS = range(2**31)
"""What token ids can be at all; the engine knows how many the model has."""
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_IDS.stop)]
Bias = Annotated[
    dict[Annotated[str, Field(pattern=f"^({TOKEN_ID.pattern})$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(json_schema_extra={"additionalProperties": False}),
]


def check_bias(value: Any) -> Any:
    """A number for each of some token ids, which JSON writes as strings."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) and TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError('must be an object from token ids to numbers, for example {"42": -100}')
    for token_id, bias in value.items():
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {token_id} must be a number between -{MAX_BIAS} and {MAX_BIAS}")
    return value


class SteeringFields(Strict):
    """The fields by which completions and chat steer sampling. One given as null has its default."""

    repetition_penalty: float | None = Field(
        None, gt=0, le=2, description="divides positive and multiplies negative logits of tokens said; 1 is off"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[Bias | None, BeforeValidator(check_bias)] = Field(
        None, description="what is added to the logits of tokens, by token id"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128, description="tokens that end the answer")
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="smaller is served earlier; 0 is the default"
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="computed prefixes are shared only with requests of the same salt"
    )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids and what is added to their logits."""
        return tuple((int(token_id), float(bias)) for token_id, bias in (self.logit_bias or {}).items())
