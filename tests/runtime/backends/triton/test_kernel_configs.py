"""Which configuration runs for how many tokens: defaults, and tables that were measured."""

from pathlib import Path

import pytest
import torch

from compress.common.errors import DataError
from runtime.backends.measured import table_path
from runtime.backends.triton import device as triton_device
from runtime.backends.triton import linear as triton_linear
from runtime.backends.triton.device import Gpu
from runtime.backends.triton.kernels.configs import (
    BUCKETS,
    EXPAND,
    GEMM,
    SKINNY,
    KernelConfig,
    config_for,
    default_plan,
    measured_plan,
    to_json,
)

LAYERS = ((6144, 32), (4096, 32), (28672, 32), (4096, 112))
"""Rows and tiles of the linears of an 8B model."""


@pytest.mark.parametrize(("rows", "tiles"), [(128, 1), (4096, 32), (28672, 32), (8192, 112)])
def test_defaults_split_no_more_than_there_is_to_do(rows: int, tiles: int) -> None:
    plan = default_plan(4, rows, tiles, 132)
    assert set(plan) == set(BUCKETS)
    assert [plan[m].kernel for m in (1, 64, 128, 1024, 2048)] == [SKINNY, SKINNY, GEMM, GEMM, EXPAND]
    assert all(config.splits <= max(1, tiles // 4) for config in plan.values())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_small_groups_are_scaled_one_by_one_from_17_tokens_on(bits: int) -> None:
    small, large, whole = (default_plan(bits, 4096, 64, 132, scaled) for scaled in (64, 128, 0))
    assert [small[m].kernel for m in (8, 16, 32, 64, 128)] == [SKINNY, SKINNY, GEMM, GEMM, GEMM]
    assert [small[m].block_m for m in (32, 64)] == [32, 64]
    assert large == whole
    assert [large[m] for m in (1, 16, 128, 2048)] == [small[m] for m in (1, 16, 128, 2048)]


def busy(rows: int, tiles: int, tokens: int) -> float:
    """Returns the programs of a product over the 132 processors of an H200."""
    config = default_plan(4, rows, tiles, 132)[tokens]
    return -(-rows // config.block_n) * -(-tokens // config.block_m) * config.splits / 132


def test_few_tokens_have_several_programs_for_each_processor() -> None:
    assert all(busy(rows, tiles, tokens) > 2.8 for rows, tiles in LAYERS for tokens in (1, 8, 16, 32))


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_layers_with_few_outputs_are_split_to_fill_the_processors(tokens: int) -> None:
    assert all(busy(4096, tiles, tokens) > 0.95 for tiles in (32, 112))


def test_tiles_are_no_larger_than_the_tokens() -> None:
    plan = default_plan(4, 4096, 32, 132)
    assert [plan[m].block_m for m in (1, 2, 4, 8, 16, 32, 64)] == [8, 8, 8, 8, 16, 32, 64]


def test_a_call_takes_the_next_bucket() -> None:
    plan = {bucket: KernelConfig(SKINNY, splits=bucket) for bucket in BUCKETS}
    assert [config_for(plan, m).splits for m in (1, 3, 64, 65, 5000)] == [1, 4, 64, 128, 2048]


def test_a_measured_table_is_read_back_and_filled(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    few, many = KernelConfig(SKINNY, 128, 16, splits=5), KernelConfig(GEMM, 128, 128, 8, 3)
    table.write_text(to_json("Some GPU", {(4096, 1024): {16: few, 256: many}}))
    plan = measured_plan(table, "Some GPU", 4096, 1024)
    assert plan is not None
    assert [plan[m] for m in (1, 16, 32, 256, 2048)] == [few, few, many, many, many]
    assert measured_plan(table, "Another GPU", 4096, 1024) is None
    assert measured_plan(table, "Some GPU", 4096, 2048) is None


def test_a_table_is_of_4_bit_codes_in_large_groups_alone(tmp_path: Path, monkeypatch) -> None:
    few = KernelConfig(SKINNY, 128, 16, splits=5)
    monkeypatch.setattr(triton_linear, "TABLES", tmp_path)
    monkeypatch.setattr(triton_device, "gpu_of", lambda device: Gpu("Some GPU", (9, 0), 132))
    table_path(tmp_path, "Some GPU").write_text(to_json("Some GPU", {(4096, 1024): {16: few}}))
    device = torch.device("cuda")
    assert triton_linear._plan(device, 4, 4096, 8, (4096, 1024))[1] == few
    assert triton_linear._plan(device, 4, 4096, 8, (4096, 2048)) == default_plan(4, 4096, 8, 132)
    assert triton_linear._plan(device, 2, 4096, 4, (4096, 1024)) == default_plan(2, 4096, 4, 132)
    assert triton_linear._plan(device, 4, 4096, 8, (4096, 1024), 32) == default_plan(4, 4096, 8, 132, 32)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"gpu": "x"}', '{"gpu": "x", "shapes": {"1x1": {"1": {"kernel": "?"}}}}']
)
def test_a_broken_table_says_how_to_make_one(tmp_path: Path, content: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(content)
    with pytest.raises(DataError):
        measured_plan(table, "x", 1, 1)
