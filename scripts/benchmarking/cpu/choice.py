"""Tables of measured speeds by which linears on this processor choose matrix tiles, vectors or oneDNN.

python scripts/bench_kernels.py cpu --write-tables --shapes 2048x5632 5632x2048 --rows 1 8 64 512
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarking.cpu.kernels import TARGET, Contender, copied, milliseconds, random_weight
from compress.checkpoint.weights import Int
from compress.cpu.binding import tiles_refusal
from runtime.backends.base import Linear
from runtime.backends.cpu.choice import (
    BY_COMPILED_CODE,
    BY_TILES,
    BY_VECTORS,
    DENSE_FORM,
    MOST_ROWS_BY_VECTORS,
    processor,
)
from runtime.backends.cpu.linear import Activations, CpuLinear, form_of
from runtime.backends.measured import Speedups, table_path, to_json
from runtime.backends.torch.linear import ONEDNN, PrepackedLinear

GROUP = 128
REPLACED, NEW = "replaced", "new"


@dataclass(frozen=True, slots=True)
class Question:
    """Which of two ways to multiply by a weight `[O, I]` is faster, for these numbers of rows."""

    name: str
    rows: Sequence[int]
    replaced: Callable[[int, int], Linear]
    new: Callable[[int, int], Linear]

    def sides(self, in_features: int, out_features: int) -> list[Contender]:
        makers = {REPLACED: self.replaced, NEW: self.new}
        return [copied(name, lambda make=make: make(out_features, in_features)) for name, make in makers.items()]


def questions(rows: Sequence[int]) -> Iterator[Question]:
    """Yields what is to be decided: of tiles only where there are some, of oneDNN where it multiplies."""
    if not tiles_refusal():
        for bits, activations in ((2, 0), (4, 0), (8, 0), (16, 0), (2, 1), (4, 1), (8, 2)):
            yield from tile_questions(bits, Activations(activations), rows)
    if not ONEDNN.unsupported_reason(GROUP, GROUP, TARGET):
        yield Question(
            f"{DENSE_FORM} {BY_COMPILED_CODE}",
            rows,
            lambda outputs, inputs: PrepackedLinear(torch.randn(outputs, inputs).bfloat16(), None),
            lambda outputs, inputs: CpuLinear(torch.randn(outputs, inputs).bfloat16()),
        )


def tile_questions(bits: int, activations: Activations, rows: Sequence[int]) -> Iterator[Question]:
    """Yields whether tiles are faster than vectors alone, and vectors for a few rows with the bits of tiles."""

    def make(fewest_tile_rows: int) -> Callable[[int, int], Linear]:
        def linear(outputs: int, inputs: int) -> Linear:
            dense = torch.randn(outputs, inputs).bfloat16()
            weight = dense if bits == 16 else random_weight(outputs, inputs, Int(bits, GROUP))
            return CpuLinear(weight, activations=activations, fewest_tile_rows=fewest_tile_rows)

        return linear

    form, few = form_of(bits, activations), range(1, MOST_ROWS_BY_VECTORS + 1)
    yield Question(f"{form} {BY_TILES}", [count for count in rows if count not in few], make(0), make(1))
    yield Question(f"{form} {BY_VECTORS}", few, make(1), make(MOST_ROWS_BY_VECTORS + 1))


def measure(shapes: Sequence[tuple[int, int]], rows: Sequence[int], seconds: float) -> Speedups:
    """Returns by question, shape and number of rows how many times as fast the new way is."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for question in questions(rows):
        for in_features, out_features in shapes:
            torch.manual_seed(0)
            sides = question.sides(in_features, out_features)
            by_rows = found.setdefault(question.name, {}).setdefault(f"{out_features}x{in_features}", {})
            for count in question.rows:
                _, speed = milliseconds(sides, in_features, count, seconds, REPLACED)
                by_rows[str(count)] = round(speed[NEW], 3)
    return found


def write_table(speedups: Speedups, folder: Path) -> Path:
    """Writes the table of this processor into a folder, and returns its path."""
    path = table_path(folder, processor())
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(processor(), speedups), encoding="utf-8")
    return path
