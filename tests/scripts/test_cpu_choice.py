"""`bench_kernels.py cpu --write-tables`: the table that linears on a CPU choose their instructions by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

from compress.cpu.binding import absence, library, set_threads
from runtime.backends.base import Linear
from runtime.backends.cpu import choice
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.measured import LEAST, read_speedups, table_path
from runtime.backends.torch.linear import ONEDNN

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
FORMS = ("w2a16", "w4a16", "w8a16", "bf16", "w2a8", "w4a8", "w8a8")
SHAPES = ("128x256", "256x128")


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables go into a folder of their own, products are few, and tiles are measured as if there were some."""
    from benchmarking.cpu import choice as cpu_choice
    from benchmarking.cpu import kernels as cpu_kernels

    monkeypatch.setattr(choice, "TABLES", tmp_path)
    monkeypatch.setattr(cpu_kernels, "CACHES", 1)
    for module in (choice, cpu_choice):
        monkeypatch.setattr(module, "tiles_refusal", lambda: "")
    threads = torch.get_num_threads()
    choice._speedups.cache_clear()
    yield tmp_path
    choice._speedups.cache_clear()
    torch.set_num_threads(threads)
    set_threads(2)


def write_table(*options: str) -> None:
    """Runs the command; the next process would read the table."""
    import bench_kernels

    assert bench_kernels.main(["cpu", "--write-tables", "--seconds", "0", "--shapes", *SHAPES, *options]) == 0
    choice._speedups.cache_clear()


def test_the_table_is_read_and_decides_as_it_measured(tables: Path) -> None:
    write_table("--rows", "1", "5")
    table = table_path(tables, choice.processor())
    assert list(tables.iterdir()) == [table]
    found = read_speedups(table, choice.processor())
    tiles, few = (f" {name}" for name in (choice.BY_TILES, choice.BY_VECTORS))
    rows = {form + tiles: ["5"] for form in FORMS} | {form + few: ["1", "2", "3"] for form in FORMS}
    if not ONEDNN.unsupported_reason(128, 128, cpu_target()):
        rows |= {f"bf16 {choice.BY_COMPILED_CODE}": ["1", "5"]}
    shapes = {"256x128", "128x256"}
    assert {name: {shape: list(by_rows) for shape, by_rows in each.items()} for name, each in found.items()} == {
        name: dict.fromkeys(shapes, counts) for name, counts in rows.items()
    }
    means = {name: geometric_mean(r for each in by.values() for r in each.values()) for name, by in found.items()}
    assert all(mean > 0 for mean in means.values())
    for form in FORMS:
        by_vectors = choice.MOST_ROWS_BY_VECTORS + 1 if means[form + few] >= LEAST else 1
        assert choice.fewest_tile_rows(form) == (by_vectors if means[form + tiles] >= LEAST else 0)
        assert f"was measured {means[form + tiles]:.2f} times" in choice.describe(form)
    if (name := f"bf16 {choice.BY_COMPILED_CODE}") in means:
        assert (choice.dense_refusal() == "") == (means[name] >= LEAST)


def cpu_target() -> Any:
    from benchmarking.cpu.kernels import TARGET

    return TARGET


def kind_of(linear: Linear) -> str:
    if not isinstance(linear, CpuLinear):
        return "oneDNN"
    return {0: "vectors", 1: "tiles", choice.MOST_ROWS_BY_VECTORS + 1: "tiles and vectors"}[
        linear._weight.fewest_tile_rows
    ]


@pytest.mark.parametrize(
    ("faster", "fewest"),
    [("tiles", 1), ("vectors", 0), ("tiles and vectors", choice.MOST_ROWS_BY_VECTORS + 1)],
)
def test_what_is_faster_is_chosen(faster: str, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarking.cpu import choice as cpu_choice

    seconds = {"tiles": 2.0, "tiles and vectors": 2.0, "vectors": 3.0, "oneDNN": 2.5} | {faster: 1.0}

    def milliseconds(sides: Sequence[Any], in_features: int, *_: Any) -> tuple[None, dict[str, float]]:
        taken = {side.name: seconds[kind_of(side.copies[0])] for side in sides}
        assert all(side(torch.ones(1, in_features).bfloat16(), 0).shape[0] == 1 for side in sides)
        return None, {name: taken[cpu_choice.REPLACED] / own for name, own in taken.items()}

    monkeypatch.setattr(cpu_choice, "milliseconds", milliseconds)
    write_table("--rows", "8")
    assert {choice.fewest_tile_rows(form) for form in FORMS} == {fewest}
