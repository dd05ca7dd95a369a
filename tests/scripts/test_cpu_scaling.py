"""The model of how a decode step scales with cores."""

from dataclasses import replace
from typing import Any

import pytest

from compress.cpu.binding import absence, library, set_threads


@pytest.fixture(scope="module")
def scaling() -> Any:
    from benchmarking.cpu import scaling as cpu_scaling

    return cpu_scaling


@pytest.fixture
def large(scaling: Any) -> Any:
    return scaling.Product(out_features=64 * 256, nbytes=32 << 20, seconds=2e-3, count=4)


def test_chunks_are_enough_for_all_threads(scaling: Any, large: Any) -> None:
    assert scaling.num_chunks(large, 1) == 52  # 5 tiles of 8 us each
    assert scaling.num_chunks(large, 64) == 128
    assert scaling.num_chunks(replace(large, out_features=64), 64) == 1


def test_a_product_is_bound_by_its_chunks_or_by_the_memory(scaling: Any, large: Any) -> None:
    fast = scaling.Machine(threads=64, bandwidth=1e15, job_seconds=0)
    assert scaling.product_seconds(large, fast) == pytest.approx(2e-3 / 64)
    assert scaling.product_seconds(large, replace(fast, bandwidth=1e11)) == pytest.approx((32 << 20) / 1e11)
    assert scaling.product_seconds(large, replace(fast, job_seconds=1e-6)) == pytest.approx(2e-3 / 64 + 63e-6)
    assert scaling.product_seconds(replace(large, out_features=64), fast) == pytest.approx(2e-3)


def test_a_step_has_all_linears_of_the_shape(scaling: Any) -> None:
    counts = scaling.shapes_of(scaling.SHAPES["1.1b"])
    assert 1.0e9 < sum(rows * columns * count for (rows, columns), count in counts.items()) < 1.1e9


@pytest.mark.skipif(library() is None, reason=absence())
def test_rows_say_what_was_measured(scaling: Any) -> None:
    rows = list(scaling.rows_of(scaling.Step(scaling.SHAPES["tiny"]), [1], [8], [100], rounds=2))
    set_threads(0)
    assert [row["threads"] for row in rows] == ["1", "8"]
    assert float(rows[0]["measured, ms"]) > 0
    assert rows[1]["measured, ms"] == "not measured"
    assert rows[1]["GB/s"] == "100, assumed"
