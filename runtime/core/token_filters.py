"""Token filters that depend on the whole distribution: typical-p, top-n-sigma, XTC. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from compress.common.cli import option


@dataclass(frozen=True, kw_only=True)
class FilterParams:
    """Token filters in addition to truncation."""

    typical_p: float = option(
        default=1.0,
        help="Sample from the tokens closest to the expected surprise whose probabilities add up to P; 1 is off.",
    )
    top_n_sigma: float = option(
        default=0.0,
        help="Exclude tokens whose logit is more than N standard deviations below the highest; 0 is off.",
    )
    xtc_probability: float = option(
        default=0.0,
        help="Chance of excluding the most likely tokens, all above --xtc-threshold but the last; 0 is off.",
    )
    xtc_threshold: float = option(default=0.1, help="Least probability of the tokens that --xtc-probability excludes.")

    @property
    def is_filtered(self) -> bool:
        """Whether any filter is enabled."""
        return self.typical_p < 1 or self.top_n_sigma > 0 or self.has_xtc

    @property
    def has_xtc(self) -> bool:
        """Whether XTC can exclude tokens; above a threshold of 1/2 no two tokens qualify."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    def filter_rules(self) -> list[tuple[str, bool, str]]:
        """Returns name, validity and valid range of each parameter."""
        return [
            ("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1"),
            ("top_n_sigma", 0 <= self.top_n_sigma <= 100, "between 0 (off) and 100"),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "between 0 and 1"),
            ("xtc_threshold", 0 <= self.xtc_threshold <= 1, "between 0 and 1"),
        ]


def coin(seed: int, position: int) -> float:
    """Returns a number between 0 and 1 that depends on the request's seed and the token's position only."""
    digest = blake2b(f"xtc/{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
