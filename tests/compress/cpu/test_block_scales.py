"""C products with codes whose scales and minima are integers times numbers of blocks, against float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.checkpoint.weights import Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Q4Minima, Q5Minima
from compress.checkpoint.weights.coded import CodedWeight, Scales
from compress.checkpoint.weights.forms import KQuant
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, absence, best_instruction_set, library
from runtime.backends.base import Target
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.cpu.linear_kernels import BLOCKS, TABLES
from runtime.backends.prepared_weight import PreparedWeight
from runtime.backends.registry import choose_linear

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
SETS = [*range(best_instruction_set() + 1), EMULATED]
every_set = pytest.mark.parametrize("instruction_set", SETS, ids=lambda index: INSTRUCTION_SETS[index])
BLOCK = 64
KINDS = [(2, 16, True), (3, 16, False), (4, 32, True), (5, 32, True), (6, 16, False), (7, 32, True), (8, 32, False)]
every_kind = pytest.mark.parametrize(("bits", "group", "minima"), KINDS)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block_form(bits: int, group: int, minima: bool, steps: bool) -> Blocks:
    scales = Scales("float16", step_bits=8 if steps else 0, has_minima=minima)
    sizes = {"bits": bits, "group_size": group, "block_size": BLOCK if steps else group}
    return type("Drawn", (Blocks,), {"word": "drawn", "scales": scales, **sizes})()


def exactly(weight: CodedWeight) -> torch.Tensor:
    """The values in float64."""

    def of_groups(numbers: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        integers = torch.ones_like(numbers, dtype=torch.int8) if steps is None else steps
        repeated = numbers.double().repeat_interleave(integers.shape[1] // numbers.shape[1], 1) * integers
        return repeated.repeat_interleave(weight.shape[1] // integers.shape[1], 1)

    values = (weight.qweight.double() - weight.scheme.zero) * of_groups(weight.scales, weight.steps)
    return values if weight.minima is None else values - of_groups(weight.minima, weight.minimum_steps)


def draw(shape: tuple[int, int], bits: int, group: int, minima: bool, steps: bool = True, seed: int = 0):
    """Every code; steps of both signs and zero, where there are some."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.arange(shape[0] * shape[1]).view(shape).remainder(1 << bits).to(torch.uint8)
    groups, blocks = (shape[0], shape[1] // group), (shape[0], shape[1] // (BLOCK if steps else group))

    def numbers() -> torch.Tensor:
        return (torch.rand(blocks, generator=random) / 100 + 1e-3).half()

    def integers() -> torch.Tensor:
        return torch.randint(-128, 128, groups, generator=random).to(torch.int8)

    return CodedWeight(
        codes,
        numbers(),
        block_form(bits, group, minima, steps),
        numbers() if minima else None,
        integers() if steps else None,
        integers() if minima and steps else None,
    )


@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    steps=st.booleans(),
    blocks=st.integers(1, 3),
    out_features=st.integers(1, 150),
    rows=st.sampled_from([1, 2, 3, 5, 6, 7, 13, 129]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    with_bias=st.booleans(),
    instruction_set=st.sampled_from(SETS),
    seed=st.integers(0, 99),
)
def test_any_weight(kind, steps, blocks, out_features, rows, dtype, with_bias, instruction_set, seed):
    weight = draw((out_features, blocks * BLOCK), *kind, steps, seed)
    bias = activations(1, out_features, seed=seed)[0] if with_bias else None
    x = activations(rows, blocks * BLOCK, dtype, seed)
    found = CpuLinear(weight, bias, instruction_set=instruction_set)(x)
    exact = exactly(weight)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    # What minima are subtracted from may be larger than weights, but no larger than this.
    largest = exact.abs().max() + 2 * largest_minimum(weight)
    rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
    allowed = 4e-6 * (x.double().abs().sum(1, keepdim=True) * largest + 1) + rounding
    assert (found.shape, found.dtype) == ((rows, out_features), dtype)
    assert ((found.double() - expected).abs() <= allowed).all()


def largest_minimum(weight: CodedWeight) -> float:
    if weight.minima is None:
        return 0.0
    steps = torch.ones(1) if weight.minimum_steps is None else weight.minimum_steps
    return float(weight.minima.double().abs().max() * steps.double().abs().max())


@every_set
@every_kind
@pytest.mark.parametrize("steps", [True, False])
def test_every_code_value_and_place(bits, group, minima, steps, instruction_set):
    """Identity activations read the weights back, exactly: as computed in float32."""
    weight = draw((70, 128), bits, group, minima, steps)
    linear = CpuLinear(weight, instruction_set=instruction_set)
    for dtype in (torch.bfloat16, torch.float32):
        exact = weight.dequantize().to(dtype)
        assert torch.equal(linear(torch.eye(128, dtype=dtype)).T, exact)
        assert torch.equal(linear.rows(torch.tensor([69, 0, 63, 64]), dtype), exact[[69, 0, 63, 64]])
    assert torch.equal(linear.rows(torch.tensor([5]), torch.float64), exactly(weight)[[5]])


def k_weight(scheme: KQuant, rows: int, columns: int) -> CodedWeight:
    """Random bytes as blocks, all of them with small scales and minima."""
    random = torch.Generator().manual_seed(scheme.bits)
    blocks = torch.randint(0, 256, (rows, columns // 256 * scheme.block_bytes), dtype=torch.uint8, generator=random)
    weight = scheme.from_blocks(blocks)
    small = (torch.rand(rows, columns // 256, generator=random) / 1000).half()
    return replace(weight, scales=small, minima=small * 2 if scheme.scales.has_minima else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Q2K(), Q3K(), Q4K(), Q5K(), Q6K()], ids=str)
def test_k_types_as_stored(scheme, dtype):
    weight, target = k_weight(scheme, 70, 512), Target(torch.device("cpu"), dtype)
    kernel = choose_linear(scheme, 512, target).kernel
    assert kernel is BLOCKS
    linear, x = kernel.prepare(weight, None, target), activations(9, 512, dtype)
    assert linear.nbytes == kernel.nbytes(scheme, 70, 512, target)
    assert torch.equal(linear(torch.eye(512, dtype=dtype)).T, weight.dequantize(dtype))
    assert torch.equal(linear.rows(torch.tensor([69, 3]), dtype), weight.dequantize(dtype)[[69, 3]])
    assert torch.equal(kernel.layout.restore(linear.prepared(), None)(x), linear(x))
    float64 = Target(torch.device("cpu"), torch.float64)
    assert choose_linear(scheme, 512, float64).kernel is not BLOCKS


def small_weight(scheme: Blocks, rows: int, columns: int) -> CodedWeight:
    """All codes, in groups with scales of both signs where these may be negative."""
    random = torch.Generator().manual_seed(scheme.bits)
    weight = scheme.round(torch.randn(rows, columns, generator=random) / 100)
    codes = torch.arange(rows * columns).view(rows, columns).remainder(1 << scheme.bits).to(torch.uint8)
    return replace(weight, qweight=codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Q4Minima(), Q5Minima(), Iq4Nl()], ids=str)
def test_types_with_groups_of_32_as_stored(scheme, dtype):
    weight, target = small_weight(scheme, 70, 160), Target(torch.device("cpu"), dtype)
    kernel = choose_linear(scheme, 160, target).kernel
    assert kernel is (TABLES if scheme == Iq4Nl() else BLOCKS)
    linear, x = kernel.prepare(weight, None, target), activations(9, 160, dtype)
    assert linear.nbytes == kernel.nbytes(scheme, 70, 160, target)
    assert torch.equal(linear(torch.eye(160, dtype=dtype)).T, weight.dequantize(dtype))
    assert torch.equal(linear.rows(torch.tensor([69, 3]), dtype), weight.dequantize(dtype)[[69, 3]])
    assert torch.equal(kernel.layout.restore(linear.prepared(), None)(x), linear(x))


def test_a_block_takes_little_more_than_its_codes():
    """q4_k: 4 bits, two steps of 8 for 32 codes, two numbers of 16 for a block of 256."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 512), generator=random).to(torch.uint8)
    numbers, steps = torch.ones(64, 2).half(), torch.ones(64, 16, dtype=torch.int8)
    linear = CpuLinear(CodedWeight(codes, numbers, Q4K(), numbers, steps, steps))
    assert linear.nbytes * 8 / codes.numel() == 4 + 2 * 8 / 32 + 2 * 16 / 256


@every_kind
def test_prepared(bits, group, minima):
    linear = CpuLinear(draw((70, 128), bits, group, minima))
    prepared, x = linear.prepared(), activations(5, 128)
    assert torch.equal(CpuLinear(prepared)(x), linear(x))
    with pytest.raises(CheckpointError, match=r"next to its codes|bits in groups of 16"):
        CpuLinear(prepared, activations=Activations.INT8_GROUP)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scales": torch.ones(2, 3, 64).half()}, "scales"),
        ({"minima": torch.ones(2, 2, 64)}, "minima torch.float32"),
        ({"steps": torch.ones(2, 3, 64, dtype=torch.int8)}, "steps"),
        ({"minimum_steps": torch.ones(2, 4, 64, dtype=torch.uint8)}, "minimum_steps torch.uint8"),
        ({"zeros": torch.ones(2, 4, 64, dtype=torch.uint8)}, "minima, minimum_steps, steps, zeros next to"),
        ({"bias": torch.ones(2)}, "bias, minima, minimum_steps, steps next to"),
    ],
)
def test_prepared_weights_that_do_not_fit_are_refused(change, problem):
    good = CpuLinear(draw((70, 128), 4, 32, True)).prepared()
    with pytest.raises(CheckpointError, match=problem):
        CpuLinear(PreparedWeight(good.shape, {**good.tensors, **change}, good.bits, good.group))


def test_what_meets_8_bit_activations_is_refused():
    for kind in (Activations.INT8_GROUP, Activations.INT8_ROW):
        with pytest.raises(SchemeError, match="activations in 16 bits"):
            CpuLinear(draw((70, 128), 4, 32, True), activations=kind)
