"""Bits of activations in products of packed weights on CPUs, and what 8 cost, recorded in config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from compress.checkpoint.config import compression_block
from compress.checkpoint.kv_cache import AUTO
from compress.common.errors import CheckpointError

SIXTEEN_BITS, EIGHT_BITS, AS_STORED = "16bit", "8bit", "stored"
ACTIVATIONS = (AUTO, SIXTEEN_BITS, EIGHT_BITS, AS_STORED)
"""Forms; `AS_STORED` is the one that `quantization_config` describes."""
ACTIVATIONS_MEASURED_KEY = "activations_measured"
MAX_SHARE = 0.1
"""Limit of the KL that 8-bit activations add to the quantization's own, as a share of it."""


@dataclass(frozen=True, slots=True)
class MeasuredActivations:
    """KL of a checkpoint to its dense model with both forms of activations, measured on the same text.

    Attributes:
        kl_16bit, kl_8bit: mean KL in nats.
        tokens: number of predicted tokens.
    """

    kl_16bit: float
    kl_8bit: float
    tokens: int
    data: str
    data_sha256: str
    protocol: str

    @classmethod
    def of(cls, kl_16bit: float, kl_8bit: float, report: Mapping[str, Any]) -> MeasuredActivations:
        """Takes the text from the report of an evaluation."""
        names = [each.name for each in fields(cls)][2:]
        return cls(kl_16bit, kl_8bit, **{name: report[name] for name in names})

    @property
    def is_within_limit(self) -> bool:
        """Whether 8-bit activations add little enough."""
        return self.kl_8bit <= (1 + MAX_SHARE) * self.kl_16bit

    def __str__(self) -> str:
        return (
            f"KL to the dense model {self.kl_16bit:.4g} with 16-bit and {self.kl_8bit:.4g} with 8-bit activations "
            f"(limit {(1 + MAX_SHARE) * self.kl_16bit:.4g})"
        )


def measured_activations(config: Mapping[str, Any]) -> MeasuredActivations | None:
    """Reads the record in a config.json; None without one. Raises CheckpointError if it cannot be understood."""
    stored = compression_block(config).get(ACTIVATIONS_MEASURED_KEY)
    if stored is None:
        return None
    remedy = f"Remove {ACTIVATIONS_MEASURED_KEY} from config.json"
    try:
        found = MeasuredActivations(**stored)
    except TypeError as error:
        raise CheckpointError(f"{ACTIVATIONS_MEASURED_KEY} cannot be read: {error}", remedy) from error
    if not all(isinstance(number, int | float) for number in (found.kl_16bit, found.kl_8bit)):
        raise CheckpointError(f"{ACTIVATIONS_MEASURED_KEY} has a KL that is not a number", remedy)
    return found
