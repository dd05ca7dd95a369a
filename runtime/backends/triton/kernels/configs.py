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

SKINNY, GEMM, EXPAND = "skinny", "gemm", "expand"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of tokens; a call uses the first that is not smaller, or the last."""

ROWS_OF_WIDE_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Launch parameters of one product.

    Attributes:
        kernel: `skinny`, `gemm`, or `expand` (dequantize rows, then a dense product).
        block_n, block_m: rows of the weight and tokens of one program.
        splits: most stretches of K with sums of their own (`skinny` only).
    """

    kernel: str
    block_n: int = 64
    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1

    def __post_init__(self) -> None:
        if self.kernel not in (SKINNY, GEMM, EXPAND):
            raise DataError(f"kernel {self.kernel!r} does not exist", f"Kernels: {SKINNY}, {GEMM}, {EXPAND}")


Plan = Mapping[int, KernelConfig]
"""A config for every bucket."""


def default_plan(bits: int, rows: int, num_tiles: int, num_processors: int) -> dict[int, KernelConfig]:
    """Configs of a weight of `rows` x `num_tiles` tiles of 2- or 4-bit codes, where none was measured on this GPU.

    Few tokens are bound by memory: as many programs as keep it busy, four per processor, but each with work for its
    pipeline. Many are bound by arithmetic.
    """
    return {bucket: _default(bucket, bits, rows, num_tiles, num_processors) for bucket in BUCKETS}


def _default(bucket: int, bits: int, rows: int, num_tiles: int, num_processors: int) -> KernelConfig:
    if bucket > 1024:
        return KernelConfig(EXPAND)
    if bucket > 64:
        # Tiles of 2-bit codes span twice the inputs: fewer of them fit in the shared memory of an A100.
        return KernelConfig(GEMM, 128, 128, num_warps=8, num_stages=3 if bits > 2 else 2)
    block_m = max(16, bucket)
    block_n = 64 if rows < ROWS_OF_WIDE_BLOCKS else 128
    wanted = -(-4 * num_processors // -(-rows // block_n))
    splits = max(1, min(wanted, num_tiles // 4, 16))
    return KernelConfig(SKINNY, block_n, block_m, 4 if block_m <= 16 else 8, 4, splits)


def config_for(plan: Plan, num_tokens: int) -> KernelConfig:
    """The config of the first bucket that is not smaller than `num_tokens`, or of the largest."""
    bucket = next((bucket for bucket in BUCKETS if bucket >= num_tokens), BUCKETS[-1])
    return plan[bucket]


def all_configs(bits: int) -> list[KernelConfig]:
    """Every config that `default_plan` can choose at a width for any shape, once each, without splits."""
    plans = [default_plan(bits, rows, 1, 1) for rows in (ROWS_OF_WIDE_BLOCKS - 1, ROWS_OF_WIDE_BLOCKS)]
    return list(dict.fromkeys(replace(config, splits=1) for plan in plans for config in plan.values()))


def measured_plan(table: Path, gpu: str, rows: int, inputs: int) -> dict[int, KernelConfig] | None:
    """The plan that was measured for a shape on a GPU; None when the table is of another GPU or lacks the shape.

    Raises:
        DataError: the file is no such table.
    """
    try:
        content: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
        shape = content["shapes"].get(f"{rows}x{inputs}") if content["gpu"] == gpu else None
        return None if shape is None else _filled({int(m): KernelConfig(**config) for m, config in shape.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{table} is no kernel table: {error}", "Write one with scripts/tune_kernels.py") from error


def _filled(measured: Mapping[int, KernelConfig]) -> dict[int, KernelConfig]:
    """Buckets that were not measured take the config of the next larger one that was, or of the largest."""
    largest = measured[max(measured)]
    return {bucket: measured.get(min((m for m in measured if m >= bucket), default=0), largest) for bucket in BUCKETS}


def to_json(gpu: str, shapes: Mapping[tuple[int, int], Plan]) -> str:
    """The table that `measured_plan` reads."""
    content = {f"{n}x{k}": {str(m): asdict(config) for m, config in plan.items()} for (n, k), plan in shapes.items()}
    return json.dumps({"gpu": gpu, "shapes": content}, indent=1) + "\n"
