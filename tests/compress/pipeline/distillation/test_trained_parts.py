"""Parts of stored weights that are trained: found, rounded to what is stored, and differentiable."""

import pytest
import torch

from compress.checkpoint.weights import NM, Int, LowRank, NMSparsity
from compress.checkpoint.weights.base import Weight, digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import Q4K, Q6K, BlockFp8, Fp8, Iq4Nl, Mxfp4, Mxfp8, Nf4, Nvfp4, Q4Minima
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierColumns, OutlierWeight
from compress.checkpoint.weights.sparse_nm import SparseWeight
from compress.pipeline.distillation.parts import numbers, offset_unit, rounded, shifted, trained_parts, with_parts

FORMS = [
    Int(2, 64),
    Int(4, 64, False),
    Int(8, None),
    Nf4(),
    Mxfp4(),
    Nvfp4(),
    Mxfp8(),
    Fp8(),
    BlockFp8((32, 32)),
    Iq4Nl(),
    Q4Minima(),
    Q4K(),
    Q6K(),
]
KINDS = ("low rank", "packed low rank", "sparse", "outliers")


def matrix(rows: int = 80, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def coded(scheme) -> Weight:
    return scheme.round(matrix(), scale_dtype=torch.bfloat16)


def wrapped(kind: str) -> Weight:
    if kind == "low rank":
        return LowRankWeight(matrix(80, 16).bfloat16(), matrix(16).bfloat16(), LowRank(None, 16))
    if kind == "packed low rank":
        left, right = (Int(4, None).round(each) for each in (matrix(80, 16), matrix(16)))
        return LowRankWeight(left, right, LowRank(Int(4, None), 16))
    if kind == "sparse":
        values = matrix().bfloat16().where(torch.arange(256) % 4 < 2, 0)
        return SparseWeight(values, NM(None, NMSparsity(2, 4)))
    base = coded(Int(4, 64))
    assert isinstance(base, CodedWeight)
    base.qweight[:, [3, 70]] = 8
    return OutlierWeight(
        base, torch.tensor([3, 70], dtype=torch.int32), matrix(80, 2).bfloat16(), OutlierColumns(Int(4, 64), 2)
    )


def moved(weight: Weight, share: float) -> Weight:
    parts = trained_parts(weight)
    offsets = {path: torch.full_like(offset_unit(path, part), share) for path, part in parts.items()}
    values = {path: shifted(part, offset_unit(path, part), offsets[path]) for path, part in parts.items()}
    return with_parts(weight, {path: rounded(each, parts[path]) for path, each in values.items()})


WEIGHTS = [pytest.param(lambda scheme=scheme: coded(scheme), id=str(scheme)) for scheme in FORMS]
WEIGHTS += [pytest.param(lambda kind=kind: wrapped(kind), id=kind) for kind in KINDS]


@pytest.mark.parametrize("make", WEIGHTS)
def test_offsets_of_zero_change_nothing(make) -> None:
    weight = make()
    assert trained_parts(weight)
    assert digest(moved(weight, 0.0)) == digest(weight)


@pytest.mark.parametrize("make", WEIGHTS)
def test_what_is_trained_changes_values_and_can_be_stored(make) -> None:
    weight = make()
    other = moved(weight, 0.6)
    assert not torch.equal(other.dequantize(), weight.dequantize())
    if isinstance(weight, SparseWeight):
        assert torch.equal(other.dequantize() == 0, weight.dequantize() == 0)
    again = with_parts(other, trained_parts(other))
    assert digest(again) == digest(other)
    assert list(other.problems("module")) == []


@pytest.mark.parametrize("make", WEIGHTS)
def test_gradients_are_those_of_the_values(make) -> None:
    """Straight-through rounding aside, a step along the gradient changes the sum of the values by what it promises."""
    weight = make()
    weights = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    leaves = {path: numbers(part).requires_grad_() for path, part in trained_parts(weight).items()}
    (with_parts(weight, leaves).dequantize() * weights).sum().backward()
    for path, leaf in leaves.items():
        assert leaf.grad is not None
        row = int(leaf.grad.abs().flatten().argmax())
        there, step = torch.zeros_like(leaf).flatten(), float(leaf.detach().abs().mean()) / 8
        there[row] = step
        with torch.no_grad():
            both = ({**leaves, path: leaf + sign * there.view_as(leaf)} for sign in (1, -1))
            up, down = (float((with_parts(weight, each).dequantize() * weights).double().sum()) for each in both)
        assert (up - down) / (2 * step) == pytest.approx(float(leaf.grad.flatten()[row]), rel=1e-2)


def test_powers_of_two_and_8_bit_floats_are_rounded_to_neighbours() -> None:
    exponents = torch.tensor([120, 127], dtype=torch.uint8)
    assert rounded(numbers(exponents) * 1.6, exponents).tolist() == [121, 128]
    floats = torch.tensor([448.0, 1.0]).to(torch.float8_e4m3fn)
    assert rounded(torch.tensor([900.0, 1.2]), floats).tolist() == [448.0, 1.25]
