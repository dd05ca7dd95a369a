"""Prints what the demo found, as one table: size, bits per weight, perplexity, KL, tokens per second.

python scripts/demo_table.py FOLDER

FOLDER holds what scripts/demo.sh leaves: packed/, evaluation.json and client.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def rows(folder: Path) -> Iterator[Row]:
    """Name, dense value, packed value."""
    report = read(folder / "packed" / "compression_report.json")
    evaluation, client = read(folder / "evaluation.json"), read(folder / "client.json")
    structure = report["structure"]
    dense_bytes, packed_bytes = weight_bytes(Path(evaluation["baseline"])), weight_bytes(folder / "packed")
    dense_bits = 8 * dense_bytes / structure["num_parameters"]
    yield "", "dense", "packed"
    yield "size", megabytes(dense_bytes), f"{megabytes(packed_bytes)} ({dense_bytes / packed_bytes:.2f}x smaller)"
    yield "bits per weight, quantized layers", f"{dense_bits:.1f}", f"{structure['bits_per_weight']:.2f}"
    yield "bits per weight, whole model", f"{dense_bits:.1f}", f"{structure['bits_per_parameter']:.2f}"
    yield "perplexity", f"{evaluation['baseline_perplexity']:.3f}", f"{evaluation['perplexity']:.3f}"
    yield "KL to dense, mean", "0", f"{evaluation['kl_mean']:.5f} nats"
    yield "KL to dense, 99.9 %", "0", f"{evaluation['kl_p999']:.4f} nats"
    for kind in ("completion", "chat"):
        yield f"tokens/s, one client, {kind}", "", f"{client[kind]['tokens_per_second']:.1f}"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    table = list(rows(Path(sys.argv[1])))
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for index, (name, dense, packed) in enumerate(table):
        print(f"{name:{widths[0]}}  {dense:>{widths[1]}}  {packed:>{widths[2]}}")
        if index == 0:
            print("-" * (sum(widths) + 4))


if __name__ == "__main__":
    main()
