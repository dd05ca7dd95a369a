"""C products with 8-bit floats as they are stored, with every kind of scales, against float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from tiny_models import random_weight

from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Activations as InputRounding
from compress.checkpoint.weights import BlockFp8, Fp8, Mxfp8
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.base import Target
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.cpu.linear_kernels import FLOATS8
from runtime.backends.cpu.weight_layout import compiled_group
from runtime.backends.prepared_weight import PreparedWeight
from runtime.backends.registry import DEQUANTIZED, choose_linear
from runtime.backends.torch.quantized_linear import RoundedInputs

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
SETS = [*range(best_instruction_set() + 1), EMULATED]
every_set = pytest.mark.parametrize("instruction_set", SETS, ids=lambda index: INSTRUCTION_SETS[index])
SCHEMES = [BlockFp8(), Mxfp8(), Fp8(), BlockFp8((64, 96)), BlockFp8((20, 64)), BlockFp8((128, 256)), BlockFp8((64, 16))]
every_scheme = pytest.mark.parametrize(
    "scheme", [*SCHEMES[:2], *(pytest.param(scheme, marks=pytest.mark.full) for scheme in SCHEMES[2:])], ids=str
)
BFLOAT16 = Target(torch.device("cpu"), torch.bfloat16)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_number(rows: int, columns: int, scheme):
    """A weight that has all 254 codes in every place of a word, those of the smallest numbers among them."""
    weight = random_weight((rows, columns), scheme, 3)
    codes = (torch.arange(rows).view(-1, 1) + torch.arange(columns) * 7).remainder(256).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 1
    return replace(weight, qweight=codes.view(FP8))


@examples(80)
@given(
    scheme=st.sampled_from(SCHEMES),
    groups=st.integers(1, 9),
    out_features=st.integers(1, 150),
    rows=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13, 129]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    with_bias=st.booleans(),
    instruction_set=st.sampled_from(SETS),
    seed=st.integers(0, 99),
)
def test_any_weight(scheme, groups, out_features, rows, dtype, with_bias, instruction_set, seed):
    weight = random_weight((out_features, 32 * groups), scheme, seed)
    bias = activations(1, out_features, seed=seed)[0] if with_bias else None
    x = activations(rows, 32 * groups, dtype, seed)
    found = CpuLinear(weight, bias, instruction_set=instruction_set)(x)
    exact = weight.dequantize(torch.float64)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
    magnitude = x.double().abs().sum(1, keepdim=True) * exact.abs().max() + 1
    assert (found.shape, found.dtype) == ((rows, out_features), dtype)
    assert ((found.double() - expected).abs() <= 4e-6 * magnitude + rounding).all()


@every_set
@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_number_and_place(scheme, dtype, instruction_set):
    """Identity activations read the weights back, exactly: few rows and many take different instructions."""
    weight = every_number(72, 288, scheme)
    linear, exact = CpuLinear(weight, instruction_set=instruction_set), weight.dequantize(dtype)
    identity = torch.eye(288, dtype=dtype)
    assert torch.equal(linear(identity).T, exact)
    for rows in (1, 3, 7):
        assert torch.equal(linear(identity[40 : 40 + rows]).T, exact[:, 40 : 40 + rows])
    indices = torch.tensor([71, 0, 63, 64, 3])
    for read in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(linear.rows(indices, read), weight.dequantize(read)[indices])


@every_set
def test_powers_of_two_from_the_smallest_to_the_largest(instruction_set):
    """The smallest normal number and the largest finite ones; 2^-127 itself counts as zero, as denormal numbers do."""
    exponents = torch.tensor([1, 60, 127, 200, 246], dtype=torch.uint8).expand(70, -1).contiguous()
    weight = CodedWeight(torch.full((70, 160), 0x38, dtype=torch.uint8).view(FP8), exponents, Mxfp8())
    linear = CpuLinear(weight, instruction_set=instruction_set)
    assert torch.equal(linear(torch.eye(160)).T, weight.dequantize())
    smallest = replace(weight, scales=torch.zeros_like(exponents))
    assert (CpuLinear(smallest, instruction_set=instruction_set)(torch.eye(160)) == 0).all()


@every_set
@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_itself_alone(scheme, dtype, instruction_set):
    """Bit for bit, whatever the other rows hold, however many there are and however many threads compute them."""
    linear = CpuLinear(random_weight((100, 384), scheme), fewest_tile_rows=4, instruction_set=instruction_set)
    x = activations(66, 384, dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    noisy = x[:9] * 1000
    noisy[3] = float("nan")
    try:
        for threads in (1, 3):
            set_threads(threads)
            for rows in (2, 3, 6, 7, 66):
                assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(linear(torch.cat((noisy, x[:5])))[-5:], alone[:5])
    finally:
        set_threads(0)


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_stay_packed(scheme, dtype):
    target = Target(torch.device("cpu"), dtype)
    weight, x = random_weight((256, 768), scheme, 5), activations(9, 768, dtype)
    kernel = choose_linear(scheme, 768, target).kernel
    assert kernel is FLOATS8
    linear = kernel.prepare(weight, None, target)
    assert linear.nbytes == kernel.nbytes(scheme, 256, 768, target)
    assert linear.nbytes * 8 <= weight.qweight.numel() * 8.6
    assert torch.equal(linear.rows(torch.tensor([69, 3]), dtype), weight.dequantize(dtype)[[69, 3]])
    assert torch.equal(kernel.layout.restore(linear.prepared(), None)(x), linear(x))


def test_blocks_have_a_scale_for_each_tile():
    """One float32 for 64 x 128 weights, where rows of a tile share theirs; not where fused blocks end inside of one."""
    whole, parts = (random_weight((rows, 256), BlockFp8(), seed) for rows, seed in ((256, 1), (96, 2)))
    assert CpuLinear(whole).nbytes == 256 * 256 + 256 // 64 * 2 * 4
    fused = parts.fuse([random_weight((128, 256), BlockFp8(), 3)])
    assert CpuLinear(fused).nbytes == 256 * 256 + 256 * 2 * 4
    assert torch.equal(CpuLinear(fused)(torch.eye(256)).T, fused.dequantize())


def test_columns_that_blocks_do_not_divide():
    """The last block of a row is shorter: groups of 64 columns divide 128 and 320."""
    assert compiled_group(BlockFp8(), 320) == 64
    weight = every_number(70, 320, BlockFp8())
    assert torch.equal(CpuLinear(weight)(torch.eye(320)).T, weight.dequantize())


def test_rounded_inputs_stay_rounded():
    """The inputs of a scheme with 8-bit activations are rounded to 8-bit floats, and weights are not to bfloat16."""
    scheme = Fp8(InputRounding.FP8)
    weight, x = random_weight((70, 96), scheme), activations(4, 96, torch.bfloat16)
    kernel = choose_linear(scheme, 96, BFLOAT16).kernel
    linear = kernel.prepare(weight, None, BFLOAT16)
    assert (kernel.name, type(linear)) == ("cpu_fp8", RoundedInputs)
    assert torch.equal(linear(x), RoundedInputs(CpuLinear(weight))(x))
    assert not torch.equal(linear(x), CpuLinear(weight)(x))


@pytest.mark.parametrize(
    ("scheme", "columns", "reason"),
    [
        (BlockFp8((20, 36)), 160, "groups that 16 divides"),
        (BlockFp8((128, 24)), 192, "groups that 16 divides"),
        (BlockFp8(), 144, "a multiple of 32"),
        (Fp8(), 40, "a multiple of 32"),
    ],
)
def test_other_blocks_are_dequantized(scheme, columns, reason):
    choice = choose_linear(scheme, columns, BFLOAT16)
    assert choice.kernel is DEQUANTIZED
    assert reason in choice.reason


def test_other_dtypes_are_dequantized():
    choice = choose_linear(BlockFp8(), 256, Target(torch.device("cpu"), torch.float16))
    assert choice.kernel is DEQUANTIZED
    assert "cpu_fp8 computes in bfloat16 and float32" in choice.reason


def test_8_bit_integer_activations_are_refused():
    with pytest.raises(SchemeError, match="activations in 16 bits"):
        CpuLinear(random_weight((64, 64), Fp8()), activations=Activations.INT8_ROW)


@pytest.mark.parametrize(
    ("bits", "change", "problem"),
    [
        (4, {"words": torch.zeros(128 * 128 // 8, dtype=torch.int32)}, "floats of 4 bits"),
        (8, {"scales": torch.ones(2, 3, 1)}, "scales"),
        (8, {"scales": torch.ones(2, 2, 1).bfloat16()}, "scales"),
        (8, {"scales": torch.ones(2, 2, 32)}, "scales"),
    ],
)
def test_prepared_weights_that_do_not_fit_are_refused(bits, change, problem):
    good = CpuLinear(random_weight((128, 128), BlockFp8((64, 64)))).prepared()
    with pytest.raises(CheckpointError, match=problem):
        CpuLinear(PreparedWeight(good.shape, {**good.tensors, **change}, bits, good.group), is_e4m3=True)
