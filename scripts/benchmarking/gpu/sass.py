"""Machine code of one kernel on sm_90: its main loop, what that costs a thread, and how many programs fit at once.

An issue slot is one instruction of one warp: a processor has four of them a clock, and issues no faster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA")
REGISTERS, SHARED_BYTES, MOST_WARPS, MOST_PROGRAMS = 65536, 228 * 1024, 64, 32
"""Limits of a processor of sm_90, from the CUDA programming guide."""
RESERVED_SHARED_BYTES, REGISTERS_AT_ONCE = 1024, 256
"""Shared memory that the driver takes of every program; registers are given to a warp in units of this."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name with all of its parts, and the line after the predicate."""

    name: str
    text: str

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop, or of a whole kernel that has none."""

    body: tuple[Instruction, ...]

    def count(self, *kinds: str) -> int:
        return sum(each.kind in kinds for each in self.body)

    @property
    def copies_ahead(self) -> float:
        """Passes of the loop whose copies are under way while one computes: those that its wait leaves, and its own."""
        waits = [int(each.text.rsplit(",", 1)[1].strip(" ;"), 16) for each in self.body if each.name == "DEPBAR.LE"]
        groups = self.count("LDGDEPBAR")
        return max(waits) / groups + 1 if waits and groups else 0.0


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of what `nvdisasm -c` prints, and the place of every label among them."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(([A-Z0-9_]+[\w.]*).*?;)", line):
            instructions.append(Instruction(found[2], found[1]))
    return instructions, labels


def loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[Loop]:
    """Instructions between a branch backwards and its target, in the order of the branches."""
    found = []
    for place, each in enumerate(instructions):
        target = re.search(r"\.L_x_\d+", each.text) if each.kind == "BRA" else None
        first = labels.get(target[0], place) if target else place
        if first < place:
            found.append(Loop(tuple(instructions[first : place + 1])))
    return found


def main_loop(code: str) -> Loop:
    """The loop with the most products on tensor cores, of several the shortest; the whole kernel where it has none."""
    instructions, labels = parse(code)
    found = [loop for loop in loops(instructions, labels) if loop.count(*TENSOR_CORES)]
    whole = Loop(tuple(instructions))
    return max(found, key=lambda loop: (loop.count(*TENSOR_CORES), -len(loop.body)), default=whole)


def programs_at_once(registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs of one kernel that fit on a processor of sm_90, by registers of a thread, shared memory and warps."""
    of_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_memory = SHARED_BYTES // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(REGISTERS // (of_warp * num_warps), by_memory, MOST_WARPS // num_warps, MOST_PROGRAMS)


@dataclass(frozen=True)
class Resources:
    """Resources of one build: registers of a thread, bytes of shared memory and of stack, and warps."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    num_warps: int

    @property
    def programs(self) -> int:
        return programs_at_once(self.registers, self.shared_bytes, self.num_warps)


@dataclass(frozen=True)
class Tile:
    """Data that one pass of a loop reads, as its source means it.

    Attributes:
        size: dimensions of the operand in memory.
        bits: of one of its elements.
        others: tokens, or rows of queries, that it is multiplied by; 0 for kernels that multiply nothing.
    """

    size: tuple[int, ...]
    bits: int
    others: int = 0

    @property
    def elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True)
class LoopFigures:
    """Costs of one pass of the main loop of a build.

    Attributes:
        slots: issue slots of one warp.
        slots_per_element: of all warps, times 32 lanes, for each weight or element of keys and values.
        loads, copies: plain loads (LDG) and asynchronous copies (LDGSTS) of a thread; `bulk` those of a whole tile.
        bytes_in_flight: of the operand in memory, of all programs that fit on a processor.
    """

    slots: int
    slots_per_element: float
    loads: int
    copies: int
    bulk: int
    bytes_in_flight: float


def figures(loop: Loop, tile: Tile, takes: Resources) -> LoopFigures:
    return LoopFigures(
        len(loop.body),
        len(loop.body) * takes.num_warps * 32 / tile.elements,
        loop.count("LDG"),
        loop.count("LDGSTS"),
        loop.count("UBLKCP", "UTMALDG"),
        loop.copies_ahead * tile.elements * tile.bits / 8 * takes.programs,
    )
