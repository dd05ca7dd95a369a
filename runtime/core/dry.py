"""Parameters of DRY: penalties for tokens that would continue a repetition. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.common.cli import option


@dataclass(frozen=True, kw_only=True)
class DryParams:
    """Penalties for tokens that would continue a repetition."""

    dry_multiplier: float = option(
        default=0.0,
        help="Penalizes tokens that would continue a repetition by M * BASE^(length - allowed length); 0 is off.",
    )
    dry_base: float = option(default=1.75, help="Base of the DRY penalty: its growth with each repeated token.")
    dry_allowed_length: int = option(
        default=2, min=1, help="Length of a repetition from which the DRY penalty applies."
    )
    dry_penalty_last_n: int = option(
        default=-1,
        min=-1,
        help="Number of last tokens searched for repetitions; -1 is the whole context.",
    )

    @property
    def has_dry(self) -> bool:
        """Whether the DRY penalty is enabled."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    def dry_rules(self) -> list[tuple[str, bool, str]]:
        """Returns name, validity and valid range of each parameter."""
        return [
            ("dry_multiplier", 0 <= self.dry_multiplier <= 100, "between 0 and 100"),
            ("dry_base", 1 <= self.dry_base <= 10, "between 1 and 10"),
            ("dry_allowed_length", self.dry_allowed_length >= 1, "1 or more"),
            ("dry_penalty_last_n", self.dry_penalty_last_n >= -1, "0 or more, or -1 for the whole context"),
        ]
