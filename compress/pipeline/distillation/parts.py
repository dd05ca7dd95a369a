"""Numbers of a stored weight that are trained while its codes stay: scales, minima, factors, columns in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compress.checkpoint.weights import Weight
from compress.checkpoint.weights.coded import EXPONENT_BIAS, NAN_EXPONENT, CodedWeight, powers_of_two
from compress.methods.shared.learned_rounding import straight_through

FROZEN = frozenset({"qweight", "divisors"})
SCALES = frozenset({"scales", "suh", "svh"})
"""Parts that multiply others: their steps are shares of themselves."""


def trained_parts(weight: Weight) -> dict[str, Tensor]:
    """Returns the trained parts of a weight as they are stored, by their path in it."""
    found: dict[str, Tensor] = {}
    for name, part in weight.named_parts().items():
        if isinstance(part, Weight):
            found |= {f"{name}.{path}": each for path, each in trained_parts(part).items()}
        elif name not in FROZEN and (part.is_floating_point() or name == "scales"):
            found[name] = part[:: _repeats(weight)]
    return found


def with_parts(weight: Weight, parts: Mapping[str, Tensor]) -> Weight:
    """Returns the weight with other trained parts, by path."""
    changed: dict[str, Weight | Tensor] = {}
    for name, part in weight.named_parts().items():
        if isinstance(part, Weight):
            inside = {
                path.removeprefix(f"{name}."): each for path, each in parts.items() if path.startswith(f"{name}.")
            }
            changed[name] = with_parts(part, inside)
        elif name in parts:
            changed[name] = _repeated(parts[name], _repeats(weight), len(part))
    return replace(weight, **changed)


def offset_unit(path: str, part: Tensor) -> Tensor:
    """Returns the unit of the offsets of a part, float32: scales change by shares of themselves, other numbers by
    shares of their root mean square, and zeros of pruned weights stay."""
    exact = numbers(part)
    if path.rpartition(".")[2] in SCALES:
        return exact.abs()
    return exact.square().mean().sqrt() * (exact != 0 if exact.dim() > 1 else torch.ones_like(exact))


def shifted(part: Tensor, unit: Tensor, offset: Tensor) -> Tensor:
    """Returns the numbers of a part after training, float32, rounded to what is stored; rounding passes gradients
    straight through. `offset`: in multiples of `unit`."""
    return straight_through(numbers(part) + unit * offset, lambda exact: numbers(rounded(exact, part)))


def numbers(part: Tensor) -> Tensor:
    """Returns the numbers that a stored part means, float32."""
    return powers_of_two(part) if part.dtype == torch.uint8 else part.float()


def rounded(exact: Tensor, part: Tensor) -> Tensor:
    """Returns numbers in the stored dtype of `part`."""
    if part.dtype == torch.uint8:
        smallest = torch.finfo(torch.float32).tiny
        exponents = exact.clamp(min=smallest).log2().round() + EXPONENT_BIAS
        return exponents.clamp(0, NAN_EXPONENT - 1).to(torch.uint8)
    limit = torch.finfo(part.dtype).max
    return exact.clamp(-limit, limit).to(part.dtype)


def _repeats(weight: Weight) -> int:
    """Returns the rows that share a stored scale."""
    return weight.scheme.block_rows if isinstance(weight, CodedWeight) else 1


def _repeated(part: Tensor, repeats: int, rows: int) -> Tensor:
    return part if repeats == 1 else part.repeat_interleave(repeats, 0)[:rows]
