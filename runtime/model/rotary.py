"""Rotary embeddings: frequencies of every type, and angles of positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.rope import Rope
from runtime.backends.model import LayerStep


class Rotary:
    """Rotates query and key heads by their positions.

    Angles are computed in float32 for every dtype, as the models were trained and as transformers does; cosine and
    sine are then rounded to the activation dtype.
    """

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        rotated = int(head_dim * rope.partial)
        frequencies, scale = VARIANTS[rope.type](rope, rotated)
        still = torch.zeros((head_dim - rotated) // 2)
        # rotated = x * cos(angle) + swap_halves(x) * (-sin, +sin): a negative frequency gives the sign at no cost.
        self.frequencies = torch.cat((-frequencies, -still, frequencies, still)).to(device)
        self.scale: float | Tensor = scale
        if scale != 1.0 and rotated < head_dim:
            half = torch.cat((torch.full_like(frequencies, scale), torch.ones_like(still)))
            self.scale = half.repeat(2).to(device)
        self.dtype = dtype

    def exact(self) -> Rotary:
        """Returns the same rotary embedding with angles in float64.

        In float32 an angle is off by `position * 6e-8`, too much for positions far beyond the context, whose
        differences count.
        """
        exact = copy(self)
        exact.frequencies = self.frequencies.double()
        return exact

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosine and signed sine `[T, 1, D]` of int64 positions `[T]`, shared by all layers of a step."""
        cos, sin = self._cos_sin(positions)
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(self.dtype), sin.to(self.dtype)

    def by(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """As `at`, for moving heads that are already rotated (and scaled) by int64 `distances [T]`."""
        cos, sin = self._cos_sin(distances)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies).unsqueeze(-2)
        return angles.cos(), angles.sin()


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """Rotary embedding of the heads of one layer.

    Attributes:
        index: of its angles among those of a step.
        order: int64 `[D]`, see `channel_order`; None keeps it.
    """

    index: int = 0
    order: Tensor | None = None

    def __call__(self, heads: Tensor, step: LayerStep, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Rotates `[T, heads, D]`, perhaps in place, after a norm with `weight [heads, D]` if there is one."""
        heads = heads if self.order is None else heads.index_select(-1, self.order)
        return step.ops.rotate(heads, weight, eps, *step.angles[self.index])


def channel_order(rope: Rope, head_dim: int) -> Tensor | None:
    """Returns the channels of a head in the order in which they are rotated, int64 `[D]`; None keeps them.

    Channels i and i + D / 2 are a pair then, and pairs that do not rotate have frequency 0. Scores do not depend on an
    order that queries and keys share.
    """
    rotated = int(head_dim * rope.partial)
    if rotated == head_dim and not rope.interleaved:
        return None
    channels = torch.arange(rotated)
    pairs = channels.view(-1, 2) if rope.interleaved else channels.view(2, -1).T
    still = torch.arange(rotated, head_dim).view(2, -1).T
    return torch.cat((pairs, still)).T.flatten()


def _default(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    return 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0


def _linear(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): positions are divided by `factor`."""
    frequencies, scale = _default(rope, head_dim)
    return frequencies / rope.options["factor"], scale


def _llama3(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those in between blended."""
    frequencies, scale = _default(rope, head_dim)
    low, high = rope.options["low_freq_factor"], rope.options["high_freq_factor"]
    cycles = rope.options["original_max_position_embeddings"] / (2 * math.pi / frequencies)  # rounds as transformers
    kept = ((cycles - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.options["factor"] + kept * frequencies, scale


def _yarn(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071), sections 3.2 to 3.4: the same blend over dimensions, and a temperature on attention."""
    frequencies, _ = _default(rope, head_dim)
    factor = rope.options["factor"]
    fast, slow = rope.options.get("beta_fast") or 32, rope.options.get("beta_slow") or 1
    context = rope.options["original_max_position_embeddings"]
    low, high = (
        head_dim * math.log(context / (cycles * 2 * math.pi)) / (2 * math.log(rope.theta)) for cycles in (fast, slow)
    )
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, _yarn_scale(rope)


def _longrope(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753), section 3: each wavelength has a factor of its own, from one of two lists."""
    options, context = rope.options, rope.options["original_max_position_embeddings"]
    is_long = rope.length > context
    factors = torch.tensor(options["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    frequencies = 1.0 / (factors * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    scale = options.get("scales", (options.get("attention_factor"),) * 2)[is_long]
    if scale is None:
        growth = math.log(max(options["factor"], 1.0)) / math.log(context)
        scale = math.sqrt(1 + growth)
    return frequencies, float(scale)


def _yarn_scale(rope: Rope) -> float:
    explicit = rope.options.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(rope.options["factor"]) + 1.0 if rope.options["factor"] > 1 else 1.0

    above, below = rope.options.get("mscale"), rope.options.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)


def _proportional(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Gemma 4: of the pairs of a head, only a share with the highest frequencies rotates."""
    frequencies, scale = _default(rope, head_dim)
    kept = int(rope.options["share"] * head_dim // 2)
    frequencies[kept:] = 0
    return frequencies / rope.options.get("factor", 1.0), scale


VARIANTS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,  # differs beyond the model's context only, which no sequence here exceeds
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "longrope": _longrope,
    "yarn": _yarn,
}
