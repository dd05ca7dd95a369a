"""Parts of packed weights have the values of the whole: rows anywhere, columns at the multiples of their form."""

import pytest
import torch

from compress.checkpoint.scheme import Scheme, targets
from compress.checkpoint.weights import Int, Weight
from compress.checkpoint.weights.base import cut_rows
from compress.checkpoint.weights.low_rank import LowRank, LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierColumns, OutlierWeight, without_columns

ROWS = (slice(3, 7), slice(120, 200))


def check(weight: Weight, columns: slice) -> None:
    values = weight.dequantize(torch.float64)
    assert torch.equal(weight.some_rows(ROWS).dequantize(torch.float64), cut_rows(values, ROWS))
    assert torch.equal(weight.some_columns(columns).dequantize(torch.float64), values[:, columns])


def rounding_forms() -> list[Scheme]:
    forms = [form.target() for form in targets().values()]
    return [Int(4, 32), Int(3, 16, symmetric=False), Int(8, None), *(form for form in forms if form.column_multiple)]


@pytest.mark.parametrize("scheme", rounding_forms(), ids=str)
def test_parts_have_the_values_of_the_whole(scheme: Scheme) -> None:
    weight = scheme.round(torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)))
    step = scheme.column_multiple
    for columns in (slice(0, 2 * step), slice(step, 1024), slice(0, 1024)):
        check(weight, columns)


def test_outlier_columns_go_where_their_columns_go() -> None:
    dense = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    codes, columns = Int(4, 32).round(dense), torch.tensor([5, 40, 41], dtype=torch.int32)
    base = without_columns(codes, columns)
    weight = OutlierWeight(base, columns, dense[:, columns.long()].bfloat16(), OutlierColumns(Int(4, 32), 3))
    for part in (slice(0, 32), slice(32, 64), slice(64, 128), slice(32, 128)):
        check(weight, part)


@pytest.mark.parametrize("inner", [None, Int(4, 32)])
def test_factors_are_cut_at_both_ends(inner: Int | None) -> None:
    left, right = torch.randn(256, 32), torch.randn(32, 128)
    factors = (left, right) if inner is None else (inner.round(left), inner.round(right))
    weight = LowRankWeight(*factors, LowRank(inner, 32))
    values = weight.dequantize(torch.float64)
    torch.testing.assert_close(weight.some_rows(ROWS).dequantize(torch.float64), cut_rows(values, ROWS))
    torch.testing.assert_close(weight.some_columns(slice(32, 96)).dequantize(torch.float64), values[:, 32:96])
