"""Which weight-only kernel runs for how many tokens, and how: a table measured per GPU, or defaults. Free of torch.

The table is JSON, `{"gpu": name, "shapes": {"NxK": {"M": {...config...}}}}`, as `scripts/tune_kernels.py` writes it.
Nothing is tried at run time: the choice for a shape is fixed when its weight is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.common.errors import DataError
from runtime.backends.triton.sizes import next_power_of_2

SKINNY, GEMM, EXPAND = "skinny", "gemm", "expand"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of tokens, powers of two; a call uses the first that is not smaller, or the last."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Launch parameters of one product.

    Attributes:
        kernel: `skinny`, `gemm`, or `expand` (dequantize rows, then a dense product).
        block_n, block_m: rows of the weight and tokens of one program.
        splits: most stretches of K with sums of their own; not of `expand`.
    """

    kernel: str
    block_n: int = 64
    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1

    def __post_init__(self) -> None:
        if self.kernel not in (SKINNY, GEMM, EXPAND):
            raise DataError.unknown("kernel", self.kernel, (SKINNY, GEMM, EXPAND), "Kernels")


Plan = Mapping[int, KernelConfig]
"""A config for every bucket."""


SPLITS = (1, 2, 4, 8, 16)
"""Few numbers, as whoever adds the sums is compiled for each."""
TILES_OF_SPLIT = 4
"""Least tiles of K in a split, so that its pipeline fills."""
CONVERSION, START = 12, 0.3
"""Time of a program besides products: for each bit of the codes of a row that of this many tokens, and for its start
this share of a tile's. From instructions counted for sm_90."""
SUM_COST = 1.5
"""Time to write and add one partial sum, for each bit of a code: the fewer they are, the more inputs has a tile."""

OTHER_BLOCK = 1.1
"""Factor by which another block must be faster: it is another kernel to compile before the first token."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows and tokens of a program, its warps and stages, and how many of such programs keep a processor's memory
    busy: 0 where arithmetic is the limit."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    least_programs: int = 0

    def config(self, kernel: str, splits: int) -> KernelConfig:
        return KernelConfig(kernel, self.block_n, self.block_m, self.num_warps, self.num_stages, splits)


SKINNY_BLOCKS = {
    8: Block(64, 8, 2, 5, 3),
    16: Block(64, 16, 2, 5, 3),
    32: Block(64, 32, 2, 4, 3),
    64: Block(128, 64, 4, 4, 1),
}
"""By most tokens. Two warps have no product of a warpgroup, each of which would be waited for."""
GEMM_BLOCKS = Block(128, 128, 8, 3), Block(128, 64, 4, 3)
SMALL_GEMM_BLOCKS = {32: Block(64, 32, 2, 4, 3), 64: Block(128, 64, 4, 3, 1)}
"""By most tokens."""
LEAST_SCALED = 128
"""Inputs of which the skinny GEMM scales the sums at once. Where a group has fewer, scaling each weight takes fewer
instructions from 17 tokens on."""


def _skinny_blocks(bits: int) -> dict[int, Block]:
    # Tiles of 2-bit codes span twice the inputs, which takes more registers and shared memory.
    return SKINNY_BLOCKS if bits > 2 else SKINNY_BLOCKS | {64: Block(128, 64, 8, 3, 1)}


def _gemm_blocks(tokens: int, bits: int) -> list[Block]:
    blocks = [SMALL_GEMM_BLOCKS[tokens]] if tokens in SMALL_GEMM_BLOCKS else GEMM_BLOCKS
    return [replace(block, num_stages=block.num_stages - (bits == 2)) for block in blocks]


@dataclass(frozen=True, slots=True)
class Task:
    """A product of `tokens` by a weight of `rows` x `num_tiles` tiles of 2-, 4- or 8-bit codes on a GPU.

    Attributes:
        scaled: inputs of a tile that share a scale; 0 if whole rows do.
    """

    bits: int
    rows: int
    num_tiles: int
    tokens: int
    num_processors: int
    scaled: int = 0

    @property
    def kernel(self) -> str:
        most = 16 if 0 < self.scaled < LEAST_SCALED else 64
        return SKINNY if self.tokens <= most else GEMM

    @property
    def blocks(self) -> list[Block]:
        """Programs worth considering."""
        if self.kernel == SKINNY:
            return [_skinny_blocks(self.bits)[max(8, self.tokens)]]
        return _gemm_blocks(self.tokens, self.bits)

    def programs(self, block: Block, splits: int) -> int:
        return -(-self.rows // block.block_n) * -(-self.tokens // block.block_m) * splits

    def fills(self, block: Block, splits: int) -> bool:
        """Returns whether enough programs keep the memory busy."""
        return self.programs(block, splits) >= 0.95 * block.least_programs * self.num_processors

    def cost(self, block: Block, splits: int) -> float:
        """Time of the busiest processor, in products of a token and a row over a tile's inputs."""
        waves = -(-self.programs(block, splits) // self.num_processors)
        tiles = waves * (-(-self.num_tiles // splits) + START)
        sums = splits * self.tokens * self.rows / self.num_processors if splits > 1 else 0
        return tiles * block.block_n * (block.block_m + CONVERSION * self.bits) + SUM_COST * self.bits * sums


def default_plan(bits: int, rows: int, num_tiles: int, num_processors: int, scaled: int = 0) -> dict[int, KernelConfig]:
    """Configs of a weight, as `Task` has it, where none was measured on this GPU: the least time of the busiest
    processor, in whole waves of programs."""
    return {bucket: _default(Task(bits, rows, num_tiles, bucket, num_processors, scaled)) for bucket in BUCKETS}


def _default(task: Task) -> KernelConfig:
    if task.tokens > 1024:
        return KernelConfig(EXPAND)
    most = max(1, task.num_tiles // TILES_OF_SPLIT)
    choices = [(block, splits) for block in task.blocks for splits in SPLITS if splits <= most]
    full = [(block, splits) for block, splits in choices if task.fills(block, splits)]
    first = choices[0][0]
    costs = {(b, s): task.cost(b, s) * (1 if b == first else OTHER_BLOCK) for b, s in full or choices[-1:]}
    block, splits = min(costs, key=lambda choice: costs[choice])
    return block.config(task.kernel, splits)


def bucket_of(num_tokens: int) -> int:
    """The first bucket that is not smaller than a number of tokens, or the largest."""
    return next_power_of_2(num_tokens) if num_tokens < BUCKETS[-1] else BUCKETS[-1]


def config_for(plan: Plan, num_tokens: int) -> KernelConfig:
    """The config of the bucket of a number of tokens."""
    return plan[bucket_of(num_tokens)]


def measured_plan(table: Path, gpu: str, rows: int, inputs: int) -> dict[int, KernelConfig] | None:
    """The plan that was measured for a shape on a GPU; None when the table is of another GPU or lacks the shape.

    Raises:
        DataError: the file is not such a table.
    """
    try:
        content: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
        shape = content["shapes"].get(f"{rows}x{inputs}") if content["gpu"] == gpu else None
        return None if shape is None else _filled({int(m): KernelConfig(**config) for m, config in shape.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{table} is not a kernel table: {error}", "Write one with scripts/tune_kernels.py") from error


def _filled(measured: Mapping[int, KernelConfig]) -> dict[int, KernelConfig]:
    """Buckets that were not measured take the config of the next larger one that was, or of the largest."""
    largest = measured[max(measured)]
    return {bucket: measured.get(min((m for m in measured if m >= bucket), default=0), largest) for bucket in BUCKETS}


def to_json(gpu: str, shapes: Mapping[tuple[int, int], Plan]) -> str:
    """The table that `measured_plan` reads."""
    content = {f"{n}x{k}": {str(m): asdict(config) for m, config in plan.items()} for (n, k), plan in shapes.items()}
    return json.dumps({"gpu": gpu, "shapes": content}, indent=1) + "\n"
