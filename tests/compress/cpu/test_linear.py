"""C linears against the exact product in float64, with every instruction set this machine has and emulated tiles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from tiny_models import random_weight

from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Activations as InputRounding
from compress.checkpoint.weights import Int, Mxfp4, Nf4, Nvfp4
from compress.checkpoint.weights.coded import EXPONENTS, Scales
from compress.checkpoint.weights.layouts import PackedCodes
from compress.checkpoint.weights.rotated_inputs import rotate
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.base import Target
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.cpu.linear_kernels import TABLES
from runtime.backends.registry import choose_linear

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
SETS = [*range(best_instruction_set() + 1), EMULATED]
every_set = pytest.mark.parametrize("instruction_set", SETS, ids=lambda index: INSTRUCTION_SETS[index])
LARGE = 3e33
"""Value of guard bytes, which must not be read or overwritten."""


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(0)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within the rounding of float32 sums, and of the result to its dtype. Products of codes beyond zero points may be
    larger than those of the weight, so errors are measured by the largest weight."""
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    magnitude = x.double().abs().sum(1, keepdim=True) * weight.abs().max() + 1e-30
    rounding = 2**-8 * expected.abs() if found.dtype == torch.bfloat16 else 0
    assert ((found.double() - expected).abs() <= 4e-6 * magnitude + rounding).all()


@examples(120)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    group=st.sampled_from([16, 32, 64, 96, 128, 160, None]),
    groups=st.integers(1, 3),
    out_features=st.integers(1, 150),
    rows=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13, 129]),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    with_bias=st.booleans(),
    instruction_set=st.sampled_from(SETS),
    seed=st.integers(0, 99),
)
def test_any_weight(
    bits, symmetric, group, groups, out_features, rows, scale_dtype, dtype, with_bias, instruction_set, seed
):
    shape = out_features, max(32, group or 32 * (1 + seed % 9)) * groups
    weight = random_weight(shape, Int(bits, group, symmetric), seed, dtype=scale_dtype)
    bias = activations(1, out_features, seed=seed)[0] if with_bias else None
    x = activations(rows, shape[1], dtype, seed)
    found = CpuLinear(weight, bias, instruction_set=instruction_set)(x)
    assert (found.shape, found.dtype) == ((rows, out_features), dtype)
    assert_close(found, x, weight.dequantize(torch.float64), bias)


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", Activations)
@pytest.mark.parametrize("order", [2, 32, 128])
def test_rotated_inputs_have_the_bits_of_plain_torch(order, form, dtype, instruction_set):
    weight = random_weight((70, 256), Int(4, 64), 1)
    for rows in (1, 3, 40):
        x = activations(rows, 320, dtype)[:, 32:288]
        linear = CpuLinear(weight, activations=form, instruction_set=instruction_set)
        expected = linear(rotate(x, order))
        assert torch.equal(linear.turning(order)(x), expected)


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 32), (64, 96), (200, 544)])
def test_numbers(shape, dtype, instruction_set):
    weight = activations(*shape, torch.bfloat16, seed=1)
    for rows in (1, 7, 20):
        x = activations(rows, shape[1], dtype)
        assert_close(CpuLinear(weight, instruction_set=instruction_set)(x), x, weight.double())


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_value_and_place(bits, dtype, instruction_set):
    """Identity activations read the weights back, exactly: all codes, zero points and scales in their places."""
    base = random_weight((70, 128), Int(bits, 32, symmetric=False))
    codes = torch.arange(70 * 128).view(70, 128).remainder(1 << bits).to(torch.uint8)
    weight = base.scheme.weight(codes, base.scales, base.zero_points)
    linear = CpuLinear(weight, instruction_set=instruction_set)
    assert torch.equal(linear(torch.eye(128, dtype=dtype)).T, weight.dequantize(dtype))
    for read in (torch.bfloat16, torch.float32, torch.float64):
        indices = torch.tensor([69, 0, 63, 64, 3])
        assert torch.equal(linear.rows(indices, read), weight.dequantize(read)[indices])


def table_form(bits: int, values: tuple[float, ...]) -> PackedCodes:
    """A form whose codes are places in a table, with bfloat16 scales of groups of 64."""
    form = type("Table", (PackedCodes,), {"key": "table", "bits": bits, "code_values": values, "scales": Scales()})
    form.group_size = 64
    return form()


@every_set
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_any_codebook(bits, instruction_set, held):
    """Also numbers that bfloat16 does not hold, which are not rounded to it."""
    codebook = activations(1, 1 << bits, held)[0]
    form = table_form(bits, tuple(codebook.tolist()))
    weight = random_weight((80, 128), form)
    dense = codebook.double()[weight.qweight.int()].unflatten(1, (-1, 64)) * weight.scales.double().unsqueeze(-1)
    linear = CpuLinear(weight, instruction_set=instruction_set)
    for dtype in (torch.bfloat16, torch.float32):
        x = activations(9, 128, dtype)
        assert_close(linear(x), x, dense.flatten(1))
    identity = torch.eye(128, dtype=torch.bfloat16)
    assert torch.equal(linear(identity).T, dense.flatten(1).float().bfloat16())


def with_far_scales(weight):
    """Scales from the smallest to large ones, in each row; of NVFP4 with a global scale that bfloat16 does not hold."""
    if weight.scheme.scales.dtype == EXPONENTS:
        return replace(weight, scales=torch.tensor([2, 127, 200, 121, 9], dtype=torch.uint8).expand(70, -1))
    scales = torch.tensor([1, 0x7E, 8, 0x38, 0x51], dtype=torch.uint8).repeat(2).view(FP8)
    return replace(weight, scales=scales.expand(70, -1), divisors=torch.full((70, 1), 777.7))


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normal_floats_as_stored(dtype, instruction_set):
    """Their numbers, which bfloat16 does not hold, are not rounded before products."""
    weight, target = random_weight((70, 192), Nf4(), 4), Target(torch.device("cpu"), dtype)
    kernel = choose_linear(weight.scheme, 192, target).kernel
    assert kernel is TABLES
    linear = CpuLinear(weight, instruction_set=instruction_set)
    assert torch.equal(linear(torch.eye(192, dtype=dtype)).T, weight.dequantize(dtype))
    for rows in (1, 3, 140):
        x = activations(rows, 192, dtype)
        assert_close(linear(x), x, weight.dequantize(torch.float64))
    linear = kernel.prepare(weight, None, target)
    assert_close(linear(x), x, weight.dequantize(torch.float64))
    assert linear.nbytes == kernel.nbytes(weight.scheme, 70, 192, target)


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Mxfp4(), Nvfp4()], ids=str)
def test_4_bit_floats_as_stored(scheme, dtype, instruction_set):
    weight, target = random_weight((70, 160), scheme, 4), Target(torch.device("cpu"), dtype)
    if scheme == Nvfp4():
        weight = replace(weight, divisors=torch.full((70, 1), 2048.0))
    kernel = choose_linear(weight.scheme, 160, target).kernel
    assert kernel is TABLES
    for each in (weight, with_far_scales(weight)):
        linear = CpuLinear(each, instruction_set=instruction_set)
        assert torch.equal(linear(torch.eye(160, dtype=dtype)).T, each.dequantize(dtype))
        assert torch.equal(linear.rows(torch.tensor([69, 3]), dtype), each.dequantize(dtype)[[69, 3]])
    for rows in (1, 3, 9, 140):
        x = activations(rows, 160, dtype)
        found = CpuLinear(weight, instruction_set=instruction_set)(x)
        assert_close(found, x, weight.dequantize(torch.float64))
    linear = kernel.prepare(weight, None, target)
    assert_close(linear(x), x, weight.dequantize(torch.float64))
    assert linear.nbytes == kernel.nbytes(weight.scheme, 70, 160, target)


def test_small_groups_are_of_float_activations_alone():
    weight = random_weight((70, 96), Nvfp4())
    with pytest.raises(SchemeError, match="activations in 16 bits"):
        CpuLinear(weight, activations=Activations.INT8_ROW)
    with pytest.raises(SchemeError, match="groups of 16 of 80 inputs"):
        CpuLinear(random_weight((70, 80), Nvfp4()))
    prepared = CpuLinear(weight).prepared()
    again = CpuLinear(prepared)
    x = activations(3, 96)
    assert torch.equal(again(x), CpuLinear(weight)(x))
    with pytest.raises(CheckpointError, match="4 bits in groups of 16"):
        CpuLinear(prepared, activations=Activations.INT8_GROUP)


@every_set
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 128), (4, None), (8, 64), (8, None)])
def test_rounded_activations(bits, group, symmetric, instruction_set):
    """Quantized activations equal plain torch's, and sums are exact up to one rounding per group."""
    weight = random_weight((100, 384), Int(bits, group, symmetric), 3)
    x = activations(15, 384)
    dense, runs = weight.dequantize(torch.float64), min(group or 128, 128)
    kinds = (Activations.INT8_ROW, 384, 127, 127), (Activations.INT8_GROUP, runs, 127, 127)
    for kind, size, largest, last in (*kinds, (Activations.INT4_ROW, 384, 8, 7)):
        grouped = x.unflatten(1, (-1, size))
        scale = grouped.abs().amax(-1, keepdim=True) / largest
        levels = ((grouped / scale).round().clamp(max=last) * scale.double()).flatten(1)
        found = CpuLinear(weight, activations=kind, instruction_set=instruction_set)(x)
        torch.testing.assert_close(found.double(), levels @ dense.T, rtol=1e-5, atol=2e-6 * dense.abs().max().item())


@every_set
@pytest.mark.parametrize("kind", Activations)
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_itself_alone(bits, kind, dtype, instruction_set):
    """Bit for bit, whatever the other rows hold, however many there are and however many threads compute them."""
    if bits == 16:
        if kind != Activations.FLOAT:
            pytest.skip("numbers have no 8-bit products")
        weight = activations(200, 384, torch.bfloat16, seed=5)
    else:
        weight = random_weight((200, 384), Int(bits, 128, symmetric=False))
    linear = CpuLinear(weight, activations=kind, instruction_set=instruction_set)
    x = activations(150, 384, dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    noisy = x * 1000
    noisy[3] = float("nan")
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in (2, 6, 7, 64, 150):
            assert torch.equal(linear(x[:rows]), alone[:rows])
        beside = linear(torch.cat((noisy, x[:5])))
        assert torch.equal(beside[-5:], alone[:5])
        assert beside[3].isnan().all()
        assert beside[:3].isfinite().all()


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_beyond_the_result_is_written_or_beside_the_input_read(dtype, instruction_set):
    weight = random_weight((75, 96), Int(4, 32, symmetric=False))
    for kind in Activations:
        linear = CpuLinear(weight, activations=kind, instruction_set=instruction_set)
        band = torch.full((12, 96 + 40), float("nan"), dtype=dtype)
        band[2:10, 8:104] = activations(8, 96, dtype)
        result = torch.full((12, 75 + 30), LARGE, dtype=dtype)
        linear.multiply_into(band[2:10, 8:104], result[2:10, 11:86])
        assert torch.equal(result[2:10, 11:86], linear(band[2:10, 8:104].contiguous()))
        result[2:10, 11:86] = LARGE
        assert (result == torch.tensor(LARGE, dtype=dtype)).all()


@every_set
def test_special_activations(instruction_set):
    weight = random_weight((64, 64), Int(8, None, True, InputRounding.INT8))
    linear = CpuLinear(weight, activations=Activations.INT8_ROW, instruction_set=instruction_set)
    x = activations(4, 64)
    x[0], x[1, 5], x[2, 7] = 0, float("nan"), float("inf")
    y = linear(x)
    assert (y[0] == 0).all()
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    assert y[3].isfinite().all()


def test_no_rows():
    assert CpuLinear(random_weight((64, 64), Int(4, 32)))(torch.empty(0, 64)).shape == (0, 64)


def test_what_does_not_fit_is_refused():
    with pytest.raises(SchemeError, match="groups of 8"):
        CpuLinear(random_weight((64, 64), Int(4, 8)))
    with pytest.raises(SchemeError, match="40 inputs"):
        CpuLinear(torch.zeros(8, 40))
