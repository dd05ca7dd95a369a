"""Sampling fields beyond OpenAI's API and truncation, by the names of llama.cpp's server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from runtime.server.protocol.strict import Strict, at_most

MAX_BREAKERS = 16
BREAKERS = ("\n", ":", '"', "*")
Breaker = Annotated[str, Field(min_length=1, max_length=64)]


class FilterFields(Strict):
    """Fields of typical-p, top-n-sigma, XTC and DRY. A field that is null has its default."""

    typical_p: float | None = Field(
        None, gt=0, le=1, description="sample from the tokens closest to the expected surprise; 1 is off"
    )
    top_n_sigma: float | None = Field(
        None,
        ge=-1,
        le=100,
        description="exclude tokens that many standard deviations below the highest logit; 0 and less are off",
    )
    xtc_probability: float | None = Field(
        None, ge=0, le=1, description="chance of excluding all tokens above the threshold but the least likely"
    )
    xtc_threshold: float | None = Field(None, ge=0, le=1, description="0.1 by default; above 0.5 nothing is excluded")
    dry_multiplier: float | None = Field(
        None, ge=0, le=100, description="penalize tokens that would continue a repetition; 0 is off"
    )
    dry_base: float | None = Field(
        None, ge=1, le=10, description="growth of that penalty with each repeated token; 1.75 by default"
    )
    dry_allowed_length: int | None = Field(
        None, ge=1, le=2**31 - 1, description="repeated tokens from which on it applies; 2 by default"
    )
    dry_penalty_last_n: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="tokens searched for repetitions; -1, the default, is the whole context"
    )
    dry_sequence_breakers: Annotated[list[Breaker] | None, at_most(MAX_BREAKERS)] = Field(
        None,
        max_length=MAX_BREAKERS,
        description="no repetition reaches across tokens with these texts; line feed, colon, quote, star by default",
    )

    @property
    def breakers(self) -> tuple[str, ...]:
        """Texts whose tokens end repetitions; none where these are not penalized."""
        if not self.dry_multiplier:
            return ()
        return BREAKERS if self.dry_sequence_breakers is None else tuple(self.dry_sequence_breakers)

    def filter_params(self) -> dict[str, Any]:
        """Returns the sampling parameters that are given."""
        penalties = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
        names = ("typical_p", "xtc_probability", "xtc_threshold", *penalties)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**given, "top_n_sigma": max(self.top_n_sigma or 0.0, 0.0)}
