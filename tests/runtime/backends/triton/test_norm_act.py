"""Operations between two products, in Triton, against `TorchOps` on the product summed in float64: every
form of input, splits, biases, scales and ragged rows, with memory poisoned before it is written."""

import pytest
import torch
from covering import covering
from poisoned_memory import poisoned_allocations
from rounding import assert_same_bits
from torch import Tensor

from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations
from runtime.backends.torch.ops import TorchOps
from runtime.backends.triton.fused_linear import (
    Q8_FLOAT,
    Q8_INT,
    ROWS,
    SUMS,
    ActivationLayout,
    CalledLinear,
    PartialSums,
    QuantizedInput,
    finished,
)

TOKENS, SIZE = 3, 200
FORMS = [
    ActivationLayout(ROWS),
    ActivationLayout(SUMS, 32, 8),
    ActivationLayout(SUMS, 128, 2),
    ActivationLayout(Q8_INT),
    ActivationLayout(Q8_FLOAT),
]
DTYPES = [torch.bfloat16, torch.float16]
KINDS = ["rows", "parts", "parts and bias", "levels", "levels and bias"]
EPS = 1e-5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_product(kind: str, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[PartialSums, Tensor]:
    """A product, with more columns than rows where they are filled up, and what it adds up to."""
    bias = numbers(rows, seed=2).to(device, dtype) if "bias" in kind else None
    exact_bias = 0 if bias is None else bias.double()
    if kind == "rows":
        y = numbers(TOKENS, rows).to(device, dtype)
        return finished(y), y
    if "levels" in kind:
        parts = torch.randint(-9000, 9000, (2, TOKENS, rows), generator=torch.Generator().manual_seed(3)).int()
        scales = numbers(TOKENS, seed=4).abs() * 1e-2, (numbers(rows, seed=5) * 1e-2).to(dtype)
        exact = parts.double().sum(0) * scales[0].double()[:, None] * scales[1].double()
        product = PartialSums(parts.to(device), rows, bias, (scales[0].to(device), scales[1].to(device)))
        return product, (exact.to(device) + exact_bias).float().to(dtype)
    parts = torch.full((3, TOKENS, rows + 56), float("nan"))
    parts[..., :rows] = numbers(3, TOKENS, rows).mul(64).round() / 64  # whose sums are exact
    exact = parts[..., :rows].double().sum(0).to(device)
    return PartialSums(parts.to(device), rows, bias), (exact + exact_bias).float().to(dtype)


def check_form(found: QuantizedInput, form: ActivationLayout, expected: Tensor) -> None:
    """`expected` holds the 16-bit rows."""
    if form.kind in (Q8_INT, Q8_FLOAT):
        levels, scale = quantize_tokens(expected, Activations.FP8 if form.kind == Q8_FLOAT else Activations.INT8)
        rows = found.rows.view(torch.float8_e4m3fn) if form.kind == Q8_FLOAT else found.rows
        assert torch.equal(rows.float(), levels)
        assert torch.equal(found.beside, scale[:, 0])
        return
    assert torch.equal(found.rows, expected)
    if form.kind == ROWS:
        assert found.beside is None
        return
    filled = torch.nn.functional.pad(expected.double(), (0, form.num_sums * form.unit - expected.shape[1]))
    sums = filled.view(TOKENS, form.num_sums, form.unit).sum(2).T
    assert found.beside.shape == sums.shape
    assert (found.beside.double() - sums).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_in_every_form(gpu, form: ActivationLayout, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.norm_act import convert_input

    x = numbers(TOKENS, SIZE).to(gpu, dtype)
    with poisoned_allocations():
        check_form(convert_input(x, form), form, x)


def test_tokens_are_rounded_as_the_contract_says(gpu) -> None:
    from runtime.backends.triton.kernels.norm_act import convert_input

    x = numbers(3, SIZE).to(gpu, torch.float16)
    x[1] = 0
    x[2, :128] = torch.arange(-64, 64) / 2  # halves, which go to the even level
    x[2, 128:] = 127
    check_form(convert_input(x, ActivationLayout(Q8_INT)), ActivationLayout(Q8_INT), x)
    x[0, 7], x[1, 3] = float("nan"), float("-inf")
    assert convert_input(x, ActivationLayout(Q8_INT)).beside.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_rounded_once(gpu, kind: str, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.norm_act import split_k_reduce

    product, expected = some_product(kind, SIZE, dtype, gpu)
    with poisoned_allocations():
        found = split_k_reduce(product, dtype)
    assert found.dtype == dtype
    assert (found != expected).float().mean() < 0.01  # next to the middle of two numbers
    assert torch.allclose(found.double(), expected.double(), rtol=1e-2)


def check_rows(plain: Tensor, expected: Tensor, found: QuantizedInput, form: ActivationLayout) -> None:
    """Few of the `plain` 16-bit rows may be rounded otherwise than `expected`; what is `found` is these in a form."""
    from runtime.backends.triton.kernels.norm_act import convert_input

    assert (plain != expected).float().mean() < 0.02
    assert torch.allclose(plain.double(), expected.double(), rtol=1e-2, atol=1e-6)
    in_form = convert_input(plain, form)
    assert_same_bits(found.rows, in_form.rows)
    assert form.kind == ROWS or torch.allclose(found.beside, in_form.beside, **beside_bound(form, plain))


def beside_bound(form: ActivationLayout, rows: Tensor) -> dict[str, float]:
    """A GPU may round a number of a row, the peak too, by a step that is 2^-7 of it at most."""
    if not rows.is_cuda:
        return {"atol": 1e-5}
    return {"atol": 2**-6 * rows.abs().max().item()} if form.kind == SUMS else {"rtol": 2**-7}


@pytest.mark.parametrize(("kind", "form", "dtype"), covering([None, *KINDS], FORMS, DTYPES), ids=str)
def test_norm_adds_and_normalizes(gpu, kind: str | None, form: ActivationLayout, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.norm_act import add_rms_norm, split_k_reduce

    hidden, weight = numbers(TOKENS, SIZE, seed=6).to(gpu, dtype), numbers(SIZE, seed=7).to(gpu, dtype)
    update = None if kind is None else some_product(kind, SIZE, dtype, gpu)[0]
    expected_hidden = hidden.clone()
    expected = TorchOps().add_rms_norm(
        expected_hidden, None if update is None else split_k_reduce(update, dtype), weight, EPS
    )
    with poisoned_allocations():
        plain = add_rms_norm(hidden.clone(), update, weight, EPS, ActivationLayout()).rows
        found = add_rms_norm(hidden, update, weight, EPS, form)
    assert_same_bits(hidden, expected_hidden)
    check_rows(plain, expected, found, form)  # squares are added in another order


@pytest.mark.parametrize(("kind", "form", "dtype"), covering(KINDS, FORMS, DTYPES), ids=str)
def test_gates_of_a_product(gpu, kind: str, form: ActivationLayout, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.norm_act import silu_and_mul, split_k_reduce

    gate_up = some_product(kind, 2 * SIZE, dtype, gpu)[0]
    expected = TorchOps().silu_and_mul(split_k_reduce(gate_up, dtype))
    with poisoned_allocations():
        plain, found = silu_and_mul(gate_up, ActivationLayout(), dtype).rows, silu_and_mul(gate_up, form, dtype)
    check_rows(plain, expected, found, form)  # another exponential function


@pytest.mark.parametrize("form", FORMS[-2:], ids=str)
def test_levels_of_rows_that_are_longer_than_a_program(gpu, form: ActivationLayout) -> None:
    from runtime.backends.triton.kernels.norm_act import GATED_BLOCK, convert_input, silu_and_mul

    gate_up = some_product("parts", 2 * (GATED_BLOCK + SIZE), torch.float16, gpu)[0]
    found, in_form = (
        silu_and_mul(gate_up, form, torch.float16),
        convert_input(silu_and_mul(gate_up, ActivationLayout(), torch.float16).rows, form),
    )
    assert_same_bits(found.rows, in_form.rows)
    assert torch.allclose(found.beside, in_form.beside, rtol=2**-7 if gpu.type == "cuda" else 0, atol=0)


def test_rows_of_a_called_linear_may_have_any_strides(gpu) -> None:
    """As PyTorch's semi-structured product gives them."""
    from runtime.backends.triton.kernels.norm_act import silu_and_mul

    y = numbers(2 * SIZE, TOKENS).to(gpu, torch.bfloat16).T
    product = CalledLinear(lambda x: y).product(QuantizedInput(y))
    expected = TorchOps().silu_and_mul(y.contiguous())
    torch.testing.assert_close(
        silu_and_mul(product, ActivationLayout(), torch.bfloat16).rows, expected, rtol=2**-7, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["parts", "levels"])
def test_a_token_does_not_see_its_neighbours(gpu, kind: str) -> None:
    from runtime.backends.triton.kernels.norm_act import add_rms_norm, silu_and_mul

    product = some_product(kind, 2 * SIZE, torch.bfloat16, gpu)[0]
    hidden, weight = numbers(TOKENS, 2 * SIZE).to(gpu, torch.bfloat16), numbers(2 * SIZE).to(gpu, torch.bfloat16)
    alone = PartialSums(product.parts[:, :1].contiguous(), product.num_rows, None, product.scales)
    for form in FORMS[2:]:
        wider = ActivationLayout(form.kind, form.unit, 2 * form.num_sums)
        assert torch.equal(
            silu_and_mul(product, form, torch.bfloat16).rows[:1], silu_and_mul(alone, form, torch.bfloat16).rows
        )
        together = add_rms_norm(hidden.clone(), product, weight, EPS, wider).rows[:1]
        assert torch.equal(together, add_rms_norm(hidden[:1].clone(), alone, weight, EPS, wider).rows)
