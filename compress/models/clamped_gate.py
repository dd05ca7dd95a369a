"""The gated activation of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """`gate * sigmoid(alpha * gate) * (up + 1)` of a gate below `limit` and an up between `-limit` and `limit`
    (arXiv:2508.10925)."""

    alpha: float
    limit: float

    def __call__(self, gate: Any, up: Any) -> Any:
        """Applies it to tensors `[T, I]`; returns a new one."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * self.alpha).sigmoid() * gate * (up + 1)
