from dataclasses import fields

import pytest
import torch

from compress.checkpoint.activations import ACTIVATIONS
from compress.checkpoint.weights import Activations, Int
from compress.common.errors import SchemeError
from compress.cpu.binding import absence
from runtime.backends.backend import BACKENDS
from runtime.backends.base import Target
from runtime.backends.cpu import linear_kernels as cpu_kernels
from runtime.backends.registry import AUTO, REFERENCE, choose_linear, linear_kernels, modes
from runtime.backends.torch import quantized_linear
from runtime.core.config import ComputeOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = Target(CPU, torch.bfloat16)
W8A8 = Int(8, None, True, Activations.INT8)
needs_native = pytest.mark.skipif(bool(absence()), reason=absence())


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="states the table of one kind of CPU")
@pytest.mark.parametrize(
    ("scheme", "in_features", "target", "name"),
    [
        (Int(4, 128), 256, BF16, "int4pack"),
        (Int(4, 128, symmetric=False), 256, BF16, "int4pack"),
        (Int(4, None), 256, BF16, "int4pack"),
        (Int(3, 64), 256, BF16, "int4pack"),
        (Int(2, 32), 256, BF16, "int4pack"),
        (Int(4, 16), 256, BF16, "dequantized"),
        (Int(4, None), 100, BF16, "dequantized"),
        (Int(5, 128), 256, BF16, "dequantized"),
        (Int(8, 128), 256, BF16, "dequantized"),
        (Int(4, 128), 256, Target(CPU, torch.float32), "dequantized"),
        (Int(4, 128), 256, Target(CPU, torch.float64), "dequantized"),
        (Int(4, 128), 256, Target(CUDA, torch.float32), "dequantized"),
        (W8A8, 256, BF16, "int8_dynamic"),
        (W8A8, 256, Target(CPU, torch.float32), "int8_dynamic"),
        (W8A8, 256, Target(CPU, torch.float64), "reference"),
        (W8A8, 256, Target(CUDA, torch.float32), "reference"),
        (Int(8, 128, True, Activations.INT8), 256, BF16, "reference"),
        (Int(4, None, True, Activations.INT4), 256, BF16, "int8_dynamic"),
    ],
)
def test_the_table_without_native_kernels(scheme, in_features, target, name, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "absence", lambda: "not compiled")
    choice = choose_linear(scheme, in_features, target)
    if name == "int8_dynamic" and not quantized_linear.has_exact_byte_products():
        name = "reference"
    assert choice.kernel.name == name
    kernels = [kernel for kernel in linear_kernels() if kernel.takes(scheme) and not kernel.mode]
    refused = [kernel.name for kernel in kernels[: kernels.index(choice.kernel)]]
    assert all(kernel in choice.reason for kernel in refused)
    assert "cpu is not there: not compiled" in choice.reason or scheme.activation_bits or target.device == CUDA


@needs_native
@pytest.mark.parametrize(
    ("scheme", "in_features", "target", "mode", "name"),
    [
        *((Int(bits, 128), 256, BF16, "auto", "cpu") for bits in range(2, 9)),
        (Int(4, None, symmetric=False), 96, Target(CPU, torch.float32), "auto", "cpu"),
        (Int(4, 128), 256, BF16, "8bit", "cpu_w4a8"),
        (Int(4, 16), 256, BF16, "8bit", "cpu"),
        (W8A8, 256, BF16, "auto", "cpu_int8"),
        (W8A8, 256, BF16, "8bit", "cpu_int8"),
        (Int(8, 64, False, Activations.INT8), 256, BF16, "auto", "cpu_int8"),
        (Int(4, 64, False, Activations.INT8), 256, Target(CPU, torch.float32), "auto", "cpu_int8"),
        (Int(4, 128, True, Activations.INT4), 256, BF16, "auto", "cpu_int4"),
        (Int(4, 128, True, Activations.INT4), 256, BF16, "8bit", "cpu_int4"),
        (Int(4, 128, True, Activations.INT4), 256, Target(CPU, torch.float64), "auto", "reference"),
        (Int(4, 16), 256, BF16, "auto", "cpu"),
        (Int(4, 8), 256, BF16, "auto", "dequantized"),
        (Int(4, None), 100, BF16, "auto", "dequantized"),
        (Int(4, 128), 256, Target(CPU, torch.float64), "auto", "dequantized"),
    ],
)
def test_the_table_with_native_kernels(scheme, in_features, target, mode, name):
    choice = choose_linear(scheme, in_features, target, mode)
    assert choice.kernel.name == name
    assert choice.reason.startswith(choice.kernel.summary)


def test_excluded_kernels_say_why():
    choice = choose_linear(Int(8, 8), 256, BF16, excluded={"dequantized": "would need 9 GiB of 1 GiB"})
    assert choice.kernel.name == "reference"
    assert "dequantized would need 9 GiB of 1 GiB" in choice.reason


def test_a_named_kernel_must_fit():
    assert choose_linear(Int(4, 128), 256, BF16, "reference").kernel.name == "reference"
    with pytest.raises(SchemeError, match=r"int4pack.*w8a16.*g128"):
        choose_linear(Int(8, 128), 256, BF16, "int4pack")
    with pytest.raises(SchemeError, match=r"'marlin'.*int4pack"):
        choose_linear(Int(4, 128), 256, BF16, "marlin")


@pytest.mark.parametrize(
    ("group_size", "in_features", "expected"),
    [(128, 512, 128), (512, 512, 256), (96, 192, 32), (None, 320, 64), (None, 100, 0), (16, 64, 0)],
)
def test_groups_are_repeated_to_one_that_the_kernel_knows(group_size, in_features, expected):
    assert quantized_linear.kernel_group_size(Int(4, group_size), in_features) == expected


def test_options_name_what_is_registered() -> None:
    """The options are declared without torch, which backends import."""
    options = {each.name: each.metadata["option"] for each in fields(ComputeOptions)}
    on_request = [name for name, each in BACKENDS.items() if each.attention and each.attention.verdict]
    assert options["attention_backend"].choices == (AUTO, *on_request)
    named = options["linear_backend"].details["help"]
    assert all(f"{mode}:" in named for mode in (REFERENCE, *(set(modes()) - set(ACTIVATIONS))))
    assert options["activations"].choices == ACTIVATIONS
