"""Kernels that are compared with plain torch at load: which pass, and what takes over from one that errs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import pack_model, random_weight, save_tiny_model
from torch import Tensor

from compress.checkpoint.weights import Activations, BlockFp8, Exl3, Fp8, Int, Mxfp4, Mxfp8, Nf4, Nvfp4, Scheme
from compress.checkpoint.weights.base import Weight
from compress.common.errors import SchemeError
from runtime.backends.backend import BACKENDS, Backend, LinearKernel
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.self_test import MOST_ERROR, find_error, prepare_tested
from runtime.backends.torch.quantized_linear import ReferenceLinear
from runtime.backends.triton.linear import KERNELS
from runtime.core.progress import Stage
from runtime.model.loader import load_model
from runtime.model.prepared import NOTHING_PREPARED

TARGET = Target(torch.device("cpu"), torch.bfloat16)
WEIGHT = random_weight((300, 256), Int(4, 128))
Change = Callable[[Tensor], Tensor]


def kernel_of(name: str, change: Change | None, calls: list[int] | None = None) -> LinearKernel[Any]:
    """The reference, whose products are changed; None fails to compile."""

    def prepare(weight: Weight, bias: Tensor | None, target: Target) -> Any:
        reference = ReferenceLinear(weight, bias)

        def multiply(x: Tensor) -> Tensor:
            if calls is not None:
                calls.append(len(x))
            if change is None:
                raise RuntimeError("no compiler\nat all")
            return change(reference(x))

        return multiply

    return LinearKernel(name, name, "int", lambda *_: "", prepare, lambda *_: 0, tested_tokens=(1, 5), is_dense=False)


@pytest.fixture
def backend():
    """Registers kernels before all others."""

    def add(*kernels: LinearKernel[Any]) -> None:
        BACKENDS.register()(Backend("tested", linears=kernels))

    yield add
    BACKENDS.remove("tested")


def prepare(kernels: str = "auto", excluded: dict[str, str] | None = None, passed: set[Any] | None = None) -> Any:
    excluded = {} if excluded is None else excluded
    choose = partial(choose_linear, WEIGHT.scheme, 256, TARGET, kernels, excluded)
    return prepare_tested(WEIGHT, None, TARGET, choose, excluded, set() if passed is None else passed)


def last_row_of_many_tokens(y: Tensor) -> Tensor:
    y[:, -1] = y[:, -1] * (1 if len(y) == 1 else 3)
    return y


ERRING: dict[str, Change | None] = {
    "other numbers": lambda y: y + y.std(),
    "no numbers": lambda y: y * torch.nan,
    "rows out of place": lambda y: y.roll(1, 1),
    "last row of many tokens": last_row_of_many_tokens,
    "cannot be compiled": None,
}


@pytest.mark.parametrize("change", ERRING.values(), ids=ERRING)
def test_the_next_kernel_takes_over_from_one_that_errs(backend, change: Change | None) -> None:
    backend(kernel_of("wrong", change), kernel_of("right", lambda y: y))
    excluded: dict[str, str] = {}
    choice, linear = prepare(excluded=excluded)
    assert choice.kernel.name == "right"
    assert list(excluded) == ["wrong"]
    assert ("no compiler" if change is None else "tokens") in excluded["wrong"]
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(linear(x), ReferenceLinear(WEIGHT, None)(x))


def test_a_form_is_tested_once(backend) -> None:
    calls: list[int] = []
    backend(kernel_of("right", lambda y: y, calls))
    passed: set[Any] = set()
    prepare(passed=passed)
    assert calls == [1, 5]
    prepare(passed=passed)
    assert calls == [1, 5]


def test_kernels_of_a_test_are_compiled_in_a_stage_of_their_own(backend, tmp_path: Path) -> None:
    backend(kernel_of("right", lambda y: y))
    pack_model(save_tiny_model(tmp_path / "dense"), tmp_path / "packed", lambda _: Int(4, 16))
    stages: list[Stage] = []
    model = load_model(
        tmp_path / "packed", prepared=NOTHING_PREPARED, report=lambda stage, done, total: stages.append(stage)
    )
    tested = {form for _, form, kernel in model.linears if kernel == "right"}
    assert stages.count(Stage.COMPILATION) == len(tested) > 0
    assert stages.index(Stage.COMPILATION) > stages.index(Stage.WEIGHTS)
    assert stages[-1] is Stage.WEIGHTS or len(model.layers) == 1


def test_a_kernel_that_was_asked_for_and_errs_is_an_error(backend) -> None:
    backend(kernel_of("wrong", lambda y: 2 * y), kernel_of("right", lambda y: y))
    with pytest.raises(SchemeError, match=r"wrong.*errs by [1-9]"):
        prepare("wrong")


def test_memory_that_is_short_is_no_error_of_a_kernel(backend) -> None:
    def full(y: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    backend(kernel_of("wrong", full))
    with pytest.raises(torch.OutOfMemoryError):
        prepare()


FORMS = [
    *(Int(4, 128), Int(2, 64, False), Int(8, None), Int(8, None, True, Activations.INT8)),
    *(Int(4, 128, True, Activations.INT8), Int(4, 64, False, Activations.INT4)),
    *(Fp8(), Fp8(Activations.FP8), BlockFp8(), Mxfp8(), Nvfp4(), Mxfp4(), Nf4(), Exl3(3)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", FORMS, ids=str)
def test_kernels_of_a_gpu_are_far_from_the_limit(gpu: torch.device, scheme: Scheme, dtype: torch.dtype) -> None:
    weight, bias = random_weight((160, 256), scheme), torch.randn(160).to(gpu, dtype)
    target = Target(gpu, dtype)
    kernel = next(each for each in KERNELS if each.numbers == scheme.numbers and not reason(each, scheme))
    linear = kernel.prepare(weight, bias, target)
    assert kernel.tested_tokens
    assert find_error((1, 17), linear, weight, bias, target) == ""
    assert "errs" in find_error((1,), lambda x: linear(x) * (1 + MOST_ERROR), weight, bias, target)


def reason(kernel: LinearKernel[Any], scheme: Scheme) -> str:
    return kernel.unsupported_reason(scheme, 256, Target(torch.device("cuda"), torch.bfloat16))
