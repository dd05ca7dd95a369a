"""Packed linears in Triton against the exact product in float64: every kernel, width, group and ragged edge, with
memory poisoned before it is written."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from covering import covering
from overlapping_kernels import record_programs
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, exact_product, relative_error
from tiny_models import random_weight

from compress.checkpoint.scale_search import FP8, quantize_tokens
from compress.checkpoint.weights import Activations, BlockFp8, Bnb4, Fp8, Int, Mxfp4, Mxfp8, Nf4, Nvfp4, Scheme
from compress.checkpoint.weights.base import Weight
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import IQ4_NL_VALUES, NF4_VALUES, Iq4Nl
from runtime.backends.base import Linear, Target
from runtime.backends.registry import choose_linear
from runtime.backends.triton import panels
from runtime.backends.triton.device import multiplies_fp8
from runtime.backends.triton.fused_linear import Q8_FLOAT, ActivationLayout
from runtime.backends.triton.kernels.configs import BUCKETS, EXPAND, GEMM, SKINNY, KernelConfig
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight
from runtime.backends.triton.linear import KERNELS, ROUNDED_KERNEL
from runtime.backends.triton.product_times import NEVER

CONFIGS = [
    KernelConfig(SKINNY, 64, 8, 2),
    KernelConfig(SKINNY, 128, 16, splits=3),
    KernelConfig(GEMM, 64, 16),
    KernelConfig(GEMM, 64, 16, splits=2),
    KernelConfig(EXPAND),
]
PLANED = [
    Int(4, 128),
    Int(4, 32, False),
    Int(4, None, False),
    Int(4, 96),
    Int(3, 64),
    Int(2, 64, False),
    Int(8, None),
    Int(8, 32, False),
    Int(6, 96),
]
W8A8, FP8_W8A8 = Int(8, None, True, Activations.INT8), Fp8(Activations.FP8)
BYTES = [W8A8, Fp8(), FP8_W8A8]


def linear_of(weight: Weight, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype, **changes) -> Linear:
    """By the kernel that a GPU takes, with other fields; it must take the memory that the kernel announces."""
    target = Target(device, dtype)
    kernel = choose_linear(weight.scheme, weight.shape[1], Target(torch.device("cuda"), dtype)).kernel
    assert kernel in KERNELS
    linear = kernel.prepare(weight, bias, target)
    assert linear.nbytes == kernel.nbytes(weight.scheme, *weight.shape, target)
    return replace(linear, **changes)


def only(config: KernelConfig) -> dict[int, KernelConfig]:
    return dict.fromkeys(BUCKETS, config)


@pytest.mark.parametrize(("config", "scheme", "dtype"), covering(CONFIGS, PLANED, list(BOUND)), ids=str)
def test_planes_against_float64(gpu, config: KernelConfig, scheme: Scheme, dtype: torch.dtype) -> None:
    inputs = 288 if scheme.group_size in (96, 32) else 512
    weight = random_weight((100, inputs), scheme)
    x, bias = activations(3, inputs, dtype, gpu), activations(1, 100, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype, plan=only(config))
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        *(
            Int(4, 64, True, Activations.INT8),
            Int(4, 32, False, Activations.INT4),
            Int(4, None, True, Activations.INT4),
        ),
        Int(8, 64, False, Activations.INT8),
    ],
    ids=str,
)
def test_rounded_inputs_against_float64(gpu, scheme: Int, dtype: torch.dtype) -> None:
    weight = random_weight((100, 256), scheme)
    sizes = torch.tensor([[1.0], [100.0], [0.01], [0.0], [3.0]]).to(gpu, dtype)
    x, bias = activations(5, 256, dtype, gpu) * sizes, activations(1, 100, dtype, gpu)[0]
    found = ROUNDED_KERNEL.prepare(weight, bias, Target(gpu, dtype))(x)
    for row, expected in zip(found, exact_product(x, weight, bias), strict=True):
        assert relative_error(row, expected) < 2 * BOUND[dtype]  # products are rounded before and after their scale


def unpack_planes(packed: InterleavedWeight) -> torch.Tensor:
    """The weight `[N, K]` that the layout holds, in float64."""
    rows, inputs = packed.shape
    shifts = torch.arange(0, 16, packed.bits, dtype=torch.int32, device=packed.words.device)
    planes = packed.words.to(torch.int32).unsqueeze(2) >> shifts[:, None] & (1 << packed.bits) - 1
    codes = planes.permute(1, 0, 2, 3).flatten(1)[:rows, :inputs] ^ (128 if packed.bits == 8 else 0)
    repeats = packed.group_size or inputs
    zero, scale = packed.scales.unsqueeze(-1).view(packed.scale_dtype).unbind(-1)
    repeats = packed.group_size or inputs
    zero, scale = (t.T[:rows].repeat_interleave(repeats, 1)[:, :inputs].double() for t in (zero, scale))
    return (codes - zero) * scale


@pytest.mark.parametrize("scheme", PLANED, ids=str)
def test_planes_hold_every_code(gpu, scheme: Scheme) -> None:
    inputs = 3 * (scheme.group_size or 96)
    weight = random_weight((130, inputs), scheme)
    packed = linear_of(weight, None, gpu, torch.bfloat16).weight
    assert torch.equal(unpack_planes(packed).cpu(), weight.dequantize(torch.float64))
    assert packed.scales.dtype == torch.int32
    assert packed.words.shape == (-(-inputs // (512 // packed.bits)), 256, 32)


@pytest.mark.full
@pytest.mark.parametrize("with_bias", [True, False])
def test_panels_are_written_where_they_belong(gpu, monkeypatch, with_bias: bool) -> None:
    monkeypatch.setattr(panels, "PANEL_ELEMENTS", 300 * 128)
    weight, x = random_weight((600, 128), Int(8, 64)), activations(3, 128, torch.float16, gpu)
    bias = activations(1, 600, torch.float16, gpu)[0] if with_bias else None
    found = linear_of(weight, bias, gpu, torch.float16, plan=only(KernelConfig(EXPAND)))(x)
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[torch.float16]


@pytest.mark.parametrize(
    ("rows", "inputs", "expected"),
    [(300, 64, [300]), (512, 64, [512]), (520, 64, [512, 8]), (300, 1024, [256, 44]), (300, 128, [256, 44])],
)
def test_a_weight_is_dense_as_a_whole_where_it_fits(monkeypatch, rows: int, inputs: int, expected: list[int]) -> None:
    monkeypatch.setattr(panels, "PANEL_ELEMENTS", 512 * 64)
    weight, x = (torch.randn(count, inputs, dtype=torch.float64) for count in (rows, 3))
    sizes = list[int]()

    def expand(first: int, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        sizes.append(len(out))
        out.copy_(weight[first : first + len(out)])

    for bias in (None, torch.randn(rows, dtype=torch.float64)):
        found = panels.multiply_by_panels(x, rows, bias, expand)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert sizes == 2 * expected


@pytest.mark.full
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
def test_scales_keep_their_precision(gpu, config: KernelConfig, scale_dtype: torch.dtype) -> None:
    """Scales are read as they are stored: in the sums exactly, in a product of 16 bits rounded to its dtype."""
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear
    from runtime.backends.triton.kernels.weight_layout import interleave

    weight = random_weight((64, 256), Int(4, 64, False))
    weight = replace(weight, scales=(0.1 * torch.rand(weight.scales.shape)).to(scale_dtype))
    x = activations(3, 256, torch.float16, gpu)
    found = W4A16Linear(interleave(weight, gpu), None, only(config))(x)
    assert relative_error(found, exact_product(x, weight)) < BOUND[torch.float16]


def test_whole_numbers_come_out_exactly(gpu) -> None:
    weight = random_weight((64, 256), Int(4, 64, False))
    weight.scales.copy_(2.0 ** torch.randint(-3, 4, weight.scales.shape))
    x = torch.randint(-1, 2, (2, 256)).to(gpu, torch.float16)
    found = linear_of(weight, None, gpu, torch.float16, plan=only(KernelConfig(SKINNY, splits=2)))(x)
    assert torch.equal(found.double(), exact_product(x, weight).half().double())


@pytest.mark.parametrize("scheme", [Int(4, 128), FP8_W8A8], ids=str)
def test_a_token_does_not_see_its_neighbours(gpu, scheme: Scheme) -> None:
    changes = {"plan": only(KernelConfig(SKINNY, splits=2))} if scheme.numbers == "int" else {}
    linear = linear_of(random_weight((64, 256), scheme), None, gpu, torch.bfloat16, **changes)
    x = activations(5, 256, torch.bfloat16, gpu)
    together = linear(x)
    x[1:] = float("nan")
    alone = linear(x)
    assert torch.equal(alone[0], together[0])
    assert not torch.isfinite(alone[1:]).any()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", BYTES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_bytes_against_float64(gpu, tokens: int, scheme: Scheme, dtype: torch.dtype) -> None:
    """8-bit floats are multiplied in 16 bits, which every GPU can."""
    weight = random_weight((70, 328 if scheme.group_size is None else 288), scheme)
    x, bias = activations(tokens, weight.shape[1], dtype, gpu), activations(1, 70, dtype, gpu)[0]
    changes = {"native": False} if scheme.numbers == "float" else {}
    linear = linear_of(weight, bias, gpu, dtype, num_processors=4, **changes)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("with_bias", [True, False])
def test_many_tokens_by_8_bit_products(gpu, with_bias: bool) -> None:
    if gpu.type == "cuda" and not multiplies_fp8(gpu):
        pytest.skip("this GPU has no 8-bit floats")
    weight, x = random_weight((150, 200), FP8_W8A8), activations(131, 200, torch.float16, gpu)
    bias = activations(1, 150, torch.float16, gpu)[0] if with_bias else None
    linear = linear_of(weight, bias, gpu, torch.float16, native=True, num_processors=4, scaled_from=NEVER)
    with poisoned_allocations():
        found = linear(x)
    # A GPU keeps about 14 bits of the sum over a block of inputs.
    assert relative_error(found, exact_product(x, weight, bias)) < (6e-4 if gpu.type == "cpu" else 2e-3)


def test_tokens_are_rounded_to_8_bit_floats_as_the_contract_says(gpu) -> None:
    from runtime.backends.triton.kernels.norm_act import convert_input

    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    between = numbers[:126] / 2 + numbers[1:127] / 2  # halfway: to the even code
    x = torch.zeros(5, 300, dtype=torch.float16)
    x[0, :126], x[0, 126:253], x[0, 253:299], x[0, 299] = between, numbers[:127], -between[:46], 448
    x[1] = activations(1, 300, torch.float16, torch.device("cpu"))[0]
    x[2] = 1e-7 * x[1]
    x[4] = x[1] * 1000
    x = x.to(gpu)
    with poisoned_allocations():
        made = convert_input(x, ActivationLayout(Q8_FLOAT))
    levels, scale = quantize_tokens(x, Activations.FP8)
    assert torch.equal(made.rows, levels.to(FP8).view(torch.uint8))
    assert torch.equal(made.beside, scale[:, 0])


def test_every_8_bit_float_is_read_as_its_number(gpu) -> None:
    weight = random_weight((64, 256), Fp8())
    weight.scales.fill_(1.0)
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[0x7F], numbers[0xFF] = 0, 0x80
    weight.qweight.view(torch.uint8)[:] = numbers
    one_hot = torch.eye(256, dtype=torch.float16, device=gpu)
    found = linear_of(weight, None, gpu, torch.float16, native=False)(one_hot)
    assert torch.equal(found[:, 0].float().cpu(), numbers.view(FP8).float())


GROUPED = [BlockFp8(), BlockFp8((32, 256)), Mxfp8()]
"""Codes of 8-bit floats with scales of blocks or groups."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", GROUPED, ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
def test_8_bit_floats_in_groups_against_float64(gpu, tokens: int, scheme: Scheme, dtype: torch.dtype) -> None:
    weight = random_weight((70, 288), scheme)
    x, bias = activations(tokens, 288, dtype, gpu), activations(1, 70, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype, num_processors=4)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


def test_powers_of_two_multiply_8_bit_floats_exactly(gpu) -> None:
    weight = random_weight((70, 160), Mxfp8())
    found = linear_of(weight, None, gpu, torch.bfloat16)(torch.eye(160, dtype=torch.bfloat16, device=gpu))
    assert torch.equal(found.T.float().cpu(), weight.dequantize(torch.bfloat16).float())


TABLES = [Nvfp4(), Mxfp4(), Nf4(), Bnb4("nf4"), Bnb4("fp4", 32)]
"""Codes of 4 bits that are places in a table."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", TABLES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_4_bit_floats_against_float64(gpu, tokens: int, scheme: Scheme, dtype: torch.dtype) -> None:
    inputs = 320 if scheme.group_size == 64 else 288
    weight = random_weight((70, inputs), scheme)
    x, bias = activations(tokens, inputs, dtype, gpu), activations(1, 70, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype, num_processors=4)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("scheme", [Nvfp4(), Mxfp4()], ids=str)
def test_every_4_bit_float_and_scale_is_in_its_place(gpu, scheme: Scheme) -> None:
    """Identity activations read the weights back exactly; powers of two as row scales round nothing."""
    weight = random_weight((70, 160), scheme)
    if scheme == Nvfp4():
        weight = replace(weight, divisors=torch.full((70, 1), 2048.0))
    linear = linear_of(weight, None, gpu, torch.bfloat16)
    found = linear(torch.eye(160, dtype=torch.bfloat16, device=gpu))
    assert torch.equal(found.T.float().cpu(), weight.dequantize(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_normal_floats_are_numbers_of_16_bits(gpu, dtype: torch.dtype) -> None:
    """Powers of two as scales, in any dtype, round nothing."""
    weight = random_weight((70, 192), Nf4())
    exponents = torch.randint(-6, 3, weight.scales.shape, generator=torch.Generator().manual_seed(0))
    scales = 2.0**exponents
    linear = linear_of(replace(weight, scales=scales.bfloat16()), None, gpu, dtype)
    found = linear(torch.eye(192, dtype=dtype, device=gpu)).T.float().cpu()
    numbers = torch.tensor(NF4_VALUES).to(dtype).float()[weight.qweight.int()]
    assert torch.equal(found, numbers * scales.repeat_interleave(64, 1))


@pytest.mark.full
@pytest.mark.parametrize("scheme", [Mxfp4(), Nf4()], ids=str)
def test_any_table_of_16_numbers(gpu, scheme: Scheme) -> None:
    values = tuple(float(17 * code - 127 - code * code // 16) for code in range(16))
    weight = random_weight((70, 192), scheme)
    linear = linear_of(weight, None, gpu, torch.bfloat16, values=values)
    found = linear(torch.eye(192, dtype=torch.bfloat16, device=gpu)).T.double().cpu()
    steps = weight.group_scales().double().repeat_interleave(scheme.group_size, 1)
    expected = torch.tensor(values, dtype=torch.float64)[weight.qweight.int()] * steps
    assert relative_error(found, expected) < BOUND[torch.bfloat16]


def random_levels(inputs: int, scales: torch.Tensor) -> CodedWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (len(scales), inputs), generator=generator).to(torch.uint8)
    return CodedWeight(codes, scales.half(), Iq4Nl())


@pytest.mark.full
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("inputs", [288, 320])
def test_levels_against_float64(gpu, inputs: int, tokens: int, dtype: torch.dtype) -> None:
    """Scales of both signs and zeros; bfloat16 would round most."""
    scales = torch.randint(-2000, 2000, (70, inputs // 32), generator=torch.Generator().manual_seed(1)) / 2**17
    scales[1] = 0
    weight = random_levels(inputs, scales)
    x, bias = activations(tokens, inputs, dtype, gpu), activations(1, 70, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype, num_processors=4)
    with poisoned_allocations():
        found = linear(x)
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_levels_are_in_their_places(gpu, dtype: torch.dtype) -> None:
    """Powers of two as scales round nothing."""
    exponents = torch.randint(-10, -3, (70, 5), generator=torch.Generator().manual_seed(1))
    weight = random_levels(160, 2.0**exponents)
    found = linear_of(weight, None, gpu, dtype)(torch.eye(160, dtype=dtype, device=gpu)).T.float().cpu()
    levels = torch.tensor(IQ4_NL_VALUES)[weight.qweight.int()]
    assert torch.equal(found, levels * weight.scales.float().repeat_interleave(32, 1))


def weight_of(scheme: Scheme, rows: int, inputs: int) -> Weight:
    if not isinstance(scheme, Iq4Nl):
        return random_weight((rows, inputs), scheme)
    return random_levels(inputs, torch.randint(-2000, 2000, (rows, inputs // 32)) / 2**17)


EXPANDED = [Fp8(), *GROUPED, *TABLES, Iq4Nl()]
"""Forms whose fused product loses to a dense one where there are many tokens."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("scheme", EXPANDED, ids=str)
def test_panels_against_float64(gpu, monkeypatch, scheme: Scheme, dtype: torch.dtype) -> None:
    """Two panels, the second one short, of a weight that fills no block."""
    monkeypatch.setattr(panels, "PANEL_ELEMENTS", 256 * 320)
    weight = weight_of(scheme, 300, 320)
    x, bias = activations(3, 320, dtype, gpu), activations(1, 300, dtype, gpu)[0]
    linear = linear_of(weight, bias, gpu, dtype, panel_from=3)
    assert not linear._products
    with poisoned_allocations():
        found = linear(x)
    assert not linear._products
    assert found.dtype == dtype
    assert relative_error(found, exact_product(x, weight, bias)) < BOUND[dtype]
    assert relative_error(linear(x[:2]), exact_product(x[:2], weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("scheme", EXPANDED, ids=str)
def test_each_form_takes_panels_for_the_tokens_of_a_prompt(gpu, scheme: Scheme) -> None:
    linear = linear_of(weight_of(scheme, 64, 192 if scheme.group_size == 64 else 256), None, gpu, torch.bfloat16)
    assert 64 < linear.panel_from <= 256


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_8_bit_floats_by_torch(gpu, dtype: torch.dtype, with_bias: bool) -> None:
    """Rows are filled up to a multiple of 16, and tokens need not be one."""
    if gpu.type == "cuda" and not multiplies_fp8(gpu):
        pytest.skip("this GPU has no 8-bit floats")
    weight, x = random_weight((70, 208), FP8_W8A8), activations(19, 208, dtype, gpu)
    bias = activations(1, 70, dtype, gpu)[0] if with_bias else None
    linear = linear_of(weight, bias, gpu, dtype)
    assert linear.qweight.shape == (80, 208)
    with poisoned_allocations():
        found = linear(x)
    assert not linear._products
    assert relative_error(found, exact_product(x, weight, bias)) < (BOUND[dtype] if gpu.type == "cpu" else 6e-3)
    assert relative_error(linear(x[:15]), exact_product(x[:15], weight, bias)) < BOUND[dtype]
    assert linear._products


def tensors_of(linear: object) -> Iterator[torch.Tensor]:
    """Tensors that a linear holds."""
    for each in fields(linear):
        value = getattr(linear, each.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from tensors_of(value)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("scheme", [Int(4, 128), Int(4, 32, False), Int(8, None), *BYTES, *GROUPED, *TABLES], ids=str)
def test_products_wait_before_they_read_and_prefetch_their_weight_alone(gpu, monkeypatch, scheme: Scheme, tokens: int):
    if gpu.type == "cuda":
        pytest.skip("programs are watched in the interpreter")
    from runtime.backends.triton.launcher import overlapping

    weight, x = random_weight((100, 512), scheme), activations(tokens, 512, torch.bfloat16, gpu)
    ours = {"scaled_from": NEVER} if scheme == FP8_W8A8 else {}
    linear = linear_of(weight, None, gpu, torch.bfloat16, **ours)
    expected = linear(x)
    programs = record_programs(monkeypatch)
    with overlapping(True):
        found = linear(x)
    assert torch.equal(found, expected)
    assert programs.waited > 0 == programs.early
    assert programs.prefetched
    for addresses in programs.prefetched:
        assert any(
            (tensor.data_ptr() <= addresses).all() and (addresses < tensor.data_ptr() + tensor.nbytes).all()
            for tensor in tensors_of(linear)
        )


def test_linears_of_the_table_choose_by_tokens(gpu) -> None:
    weight = random_weight((64, 256), Int(4, 128))
    linear = linear_of(weight, None, gpu, torch.bfloat16)
    for tokens in (1, 65, 1100):
        x = activations(tokens, 256, torch.bfloat16, gpu)
        assert relative_error(linear(x), exact_product(x, weight)) < BOUND[torch.bfloat16]
