"""A backend that a file outside of the package registers: it serves the packed linears of the demo model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import answer_all
from tiny_models import pack_model
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme, Weight
from compress.common.cli import demo_model_path
from runtime.backends.backend import BACKENDS, Backend, LinearKernel
from runtime.backends.base import Target
from runtime.backends.registry import check_name
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.describe import describe_engine
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

NAME, SUMMARY = "toy_product", "multiplies in float64, as a toy may"
PROMPT = list(range(40, 60))


class Float64Linear:
    """Keeps the weight in float64 and counts products."""

    calls = 0

    def __init__(self, weight: Weight, bias: Tensor | None, target: Target) -> None:
        self.weight, self.bias = weight.dequantize(torch.float64), bias
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        Float64Linear.calls += 1
        y = x.double() @ self.weight.T
        return (y if self.bias is None else y + self.bias.double()).to(x.dtype)


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return "" if target.device.type == "cpu" else "runs on CPUs"


def nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return 8 * rows * columns


TOY = Backend("toy", linears=(LinearKernel(NAME, SUMMARY, "int", unsupported_reason, Float64Linear, nbytes),))


@pytest.fixture
def toy() -> Iterator[None]:
    before = list(BACKENDS)
    BACKENDS.register()(TOY)
    Float64Linear.calls = 0
    yield
    BACKENDS.remove("toy")
    assert before == list(BACKENDS)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "demo"
    pack_model(demo_model_path(), folder, lambda module: Int(4, 64))
    return folder


def serve(path: Path, linear_backend: str = "auto") -> tuple[list[int], list[str]]:
    """Greedy tokens, and the lines about kernels that `runtime serve` prints."""
    config = RuntimeConfig(num_blocks=16, dtype="float64")
    engine = Engine(build_runner(load_model(path, dtype="float64", kernels=linear_backend), config), None, config)
    request = ("a", PROMPT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    return answer_all(engine, [request])["a", 0], list(describe_engine(engine))


def test_it_is_chosen_and_gives_the_same_tokens(packed: Path, toy: None) -> None:
    tokens, lines = serve(packed)
    assert Float64Linear.calls > 0
    assert any(f"kernel {NAME} ({SUMMARY}" in line for line in lines if "down_proj" in line)
    calls = Float64Linear.calls
    expected, lines = serve(packed, "reference")
    assert Float64Linear.calls == calls
    assert not any(NAME in line for line in lines)
    assert tokens == expected


def test_it_is_known_by_name_only_while_it_is_registered(toy: None) -> None:
    check_name(NAME)
    BACKENDS.remove("toy")
    with pytest.raises(Exception, match=NAME):
        check_name(NAME)
