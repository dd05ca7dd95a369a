"""Trellis codes that C multiplies as they are stored, with every instruction set this machine has."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.weights import Exl3
from compress.checkpoint.weights.exl3 import CODEBOOKS, Exl3Weight, decode_tiles
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.base import Target
from runtime.backends.cpu.trellis import TRELLIS, CpuTrellisLinear
from runtime.backends.registry import choose_linear

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
SETS = [*range(best_instruction_set() + 1), EMULATED]
every_set = pytest.mark.parametrize("instruction_set", SETS, ids=lambda index: INSTRUCTION_SETS[index])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(0)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def hadamard(order: int) -> Tensor:
    """Explicit blocks of 128."""
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
    return torch.block_diag(*[signs] * (order // 128))


def with_signs_alone(weight: Exl3Weight) -> Exl3Weight:
    return replace(weight, suh=weight.suh.sign(), svh=weight.svh.sign())


def assert_close(found: Tensor, x: Tensor, weight: Exl3Weight, bias: Tensor | float = 0.0) -> None:
    """Within the rounding of float32 sums, which are the longer the more inputs there are, and of the result."""
    expected = x.double() @ weight.dequantize(torch.float64).T + bias
    rounding = 2**-8 * expected.abs() if found.dtype == torch.bfloat16 else 0
    assert ((found.double() - expected).abs() <= 2e-5 * expected.abs().max() + rounding).all()


@every_set
@pytest.mark.parametrize(
    "scheme",
    [Exl3(bits, codebook) for bits in range(1, 9) for codebook in CODEBOOKS]
    + [Exl3(bits + 0.5, "mul1") for bits in range(1, 5)],
    ids=str,
)
def test_numbers_are_exact_and_in_their_places(scheme: Exl3, instruction_set: int) -> None:
    """Rows of a Hadamard matrix read the numbers back: all sums are short enough to be exact in float32."""
    weight = with_signs_alone(random_weight((256, 256), scheme, scheme.pair_bits))
    turn = hadamard(256)
    numbers = decode_tiles(weight.trellis, weight.scheme).double()
    expected = (numbers @ turn * weight.svh.double()).float()
    x = (turn * weight.suh.double()).float()
    assert torch.equal(CpuTrellisLinear(weight, instruction_set=instruction_set)(x), expected)


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(dtype: torch.dtype, instruction_set: int) -> None:
    for scheme, shape in ((Exl3(3, "mcg"), (128, 512)), (Exl3(5), (384, 128)), (Exl3(4.5, "mul1"), (256, 256))):
        weight = random_weight(shape, scheme, 3)
        bias = activations(1, shape[0])[0]
        linear = CpuTrellisLinear(weight, bias, instruction_set=instruction_set)
        for rows in (1, 2, 7, 65):
            x = activations(rows, shape[1], dtype)
            found = linear(x)
            assert (found.shape, found.dtype) == ((rows, shape[0]), dtype)
            assert_close(found, x, weight, bias.double())


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype, instruction_set: int) -> None:
    linear = CpuTrellisLinear(random_weight((256, 256), Exl3(3), 1), instruction_set=instruction_set)
    x = activations(150, 256, dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    noisy = x * 1000
    noisy[3] = float("nan")
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in (2, 3, 8, 9, 64, 66, 150):
            assert torch.equal(linear(x[:rows]), alone[:rows])
        beside = linear(torch.cat((noisy, x[:5])))
        assert torch.equal(beside[-5:], alone[:5])
        assert beside[3].isnan().all()
        assert beside[:3].isfinite().all()
    assert linear(x[:0]).shape == (0, 256)


def test_rows_of_x_may_lie_apart() -> None:
    linear = CpuTrellisLinear(random_weight((128, 128), Exl3(2), 1))
    wide = activations(5, 256)
    for x in (wide[:, 64:192], wide[:, ::2], wide[::2, :128]):
        assert torch.equal(linear(x), linear(x.contiguous()))


def test_dense_weights_are_faster_and_it_takes_less_memory() -> None:
    target = Target(CPU, torch.bfloat16)
    assert choose_linear(Exl3(4), 256, target).kernel.name == "dequantized"
    short = choose_linear(Exl3(4), 256, target, excluded={"dequantized": "would need 9 GiB of 1 GiB"})
    assert short.kernel is TRELLIS
    assert "would need 9 GiB" in short.reason
    assert choose_linear(Exl3(4), 256, target, "cpu_exl3").kernel is TRELLIS
    for scheme in (Exl3(1), Exl3(3, "mcg"), Exl3(2.5, "mul1")):
        linear = TRELLIS.prepare(random_weight((384, 256), scheme), None, target)
        assert linear.nbytes == TRELLIS.nbytes(scheme, 384, 256, target)
    with pytest.raises(SchemeError, match="computes in bfloat16 and float32"):
        choose_linear(Exl3(4), 256, Target(CPU, torch.float64), "cpu_exl3")


def test_prepared_weights_are_taken_as_they_are_or_refused() -> None:
    weight, x = random_weight((256, 128), Exl3(3, "mul1"), 4), activations(3, 128)
    linear = CpuTrellisLinear(weight)
    prepared = linear.prepared()
    again = CpuTrellisLinear(prepared)
    assert torch.equal(again(x), linear(x))
    assert (again.is_prepared, linear.is_prepared) == (True, False)
    for name, tensor in prepared.tensors.items():
        wrong = replace(prepared, tensors={**prepared.tensors, name: tensor.flatten()[:-1]})
        with pytest.raises(CheckpointError, match=name):
            CpuTrellisLinear(wrong)
    for wrong in (
        replace(prepared, bits=17),
        replace(prepared, bits=3),
        replace(prepared, bits=4),
        replace(prepared, shape=(256, 256)),
        replace(prepared, tensors={**prepared.tensors, "codebook": torch.tensor(3, dtype=torch.int32)}),
    ):
        with pytest.raises(CheckpointError, match="a prepared weight"):
            CpuTrellisLinear(wrong)


def test_half_bits_of_another_codebook_have_no_product() -> None:
    prepared = CpuTrellisLinear(random_weight((128, 128), Exl3(2.5, "mul1"), 4)).prepared()
    wrong = {**prepared.tensors, "codebook": torch.tensor(CODEBOOKS.index("mcg"), dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"trellis codes of 2\.5 bits of codebook 1"):
        CpuTrellisLinear(replace(prepared, tensors=wrong))
