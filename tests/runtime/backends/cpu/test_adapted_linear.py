"""Adapters in C give the products of plain torch, and layers that add them in one call the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_files import GREEDY, answers, save_adapter, shapes_of

from compress.common.cli import bundled_path
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set, library
from runtime.adapters.store import open_adapters
from runtime.backends.adapted_linear import AdaptedLinear, Factors, StepAdapters
from runtime.backends.base import Target
from runtime.backends.cpu.adapted_linear import CpuAdaptedLinear, adapted_unsupported_reason
from runtime.backends.cpu.layers import CpuLayers
from runtime.backends.cpu.linear import CpuLinear
from runtime.core.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
INPUTS, PLACES = 64, (("q", 0, 1104), ("k", 1104, 1136), ("v", 1136, 1168))
TARGET = Target(torch.device("cpu"), torch.bfloat16)


def factors(seed: int, **ranks: int) -> dict[str, Factors]:
    random = torch.Generator().manual_seed(seed)
    sizes = {name: end - begin for name, begin, end in PLACES}
    return {
        name: Factors(
            torch.randn(rank, INPUTS, generator=random).bfloat16(),
            torch.randn(sizes[name], rank, generator=random).bfloat16(),
        )
        for name, rank in ranks.items()
    }


ADAPTERS = (factors(0, q=5, k=8, v=1), {}, factors(1, v=16), factors(2, q=3))
SLOTS = torch.tensor([0, 0, 0, 0, -1, 2, 1, 2, 2, 3, 0, 3, 3])


def adapted(kind: type[AdaptedLinear], dtype: torch.dtype = torch.bfloat16, **options: int) -> AdaptedLinear:
    weight = torch.randn(PLACES[-1][2], INPUTS, generator=torch.Generator().manual_seed(5)).bfloat16()
    base = CpuLinear(weight) if kind is CpuAdaptedLinear else lambda x: x @ weight.to(dtype).T
    step = StepAdapters()
    step.begin(SLOTS)
    found = kind(base, PLACES, step, replace(TARGET, dtype=dtype), **options)
    found.fill([{name: Factors(f.down.to(dtype), f.up.to(dtype)) for name, f in each.items()} for each in ADAPTERS])
    return found


@pytest.mark.parametrize("instruction_set", range(best_instruction_set() + 1), ids=lambda each: INSTRUCTION_SETS[each])
def test_products_are_those_of_each_rows_adapter(instruction_set: int) -> None:
    x = torch.randn(len(SLOTS), INPUTS, generator=torch.Generator().manual_seed(6)).bfloat16()
    wanted = adapted(AdaptedLinear, torch.float64)(x.double())
    linear = adapted(CpuAdaptedLinear, instruction_set=instruction_set)
    found = linear(x)
    assert torch.allclose(found.double(), wanted, rtol=2**-6, atol=2**-4)
    assert torch.equal(found[4], linear.base(x)[4]), "a row without an adapter has changed"
    assert torch.equal(found, adapted(CpuAdaptedLinear)(x)), "instruction sets differ"
    linear.step.begin(SLOTS[5:6])
    assert torch.equal(linear(x[5:6]), found[5:6]), "a row depends on others"


def test_float64_adds_exactly_the_products_of_each_adapter() -> None:
    x = torch.randn(len(SLOTS), INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    linear = adapted(AdaptedLinear, torch.float64)
    found, plain = linear(x), linear.base(x)
    for row, slot in enumerate(SLOTS.tolist()):
        for name, begin, end in PLACES:
            added = torch.zeros(end - begin, dtype=torch.float64)
            if slot >= 0 and name in ADAPTERS[slot]:
                added = ADAPTERS[slot][name].up.double() @ (ADAPTERS[slot][name].down.double() @ x[row])
            assert torch.allclose(found[row, begin:end], plain[row, begin:end] + added, rtol=0, atol=1e-12)


def test_other_sizes_and_types_are_left_to_torch() -> None:
    linear = CpuLinear(torch.randn(40, 32).bfloat16())
    assert "16" in adapted_unsupported_reason(linear, (("a", 0, 40),), TARGET)
    assert adapted_unsupported_reason(linear, (("a", 0, 32),), replace(TARGET, dtype=torch.float32))


@pytest.mark.parametrize("name", ["demo", "demo-mixture"])
def test_layers_in_one_call_add_adapters(name: str, tmp_path: Path) -> None:
    """With the bits of the same functions one by one, and changed experts among them."""
    config = RuntimeConfig(enable_lora=True, num_blocks=100, block_size=16, seed=1, max_model_len=256)
    found = []
    for one_call in (True, False):
        decoder = load_model(bundled_path(name), device="cpu")
        runner = build_runner(decoder, config)
        adapters = runner.adapters
        assert adapters is not None
        shapes = shapes_of(decoder.config.spec, adapters.modules)
        attention = {module: shape for module, shape in shapes.items() if "attn" in module}
        if not isinstance(adapters.layers, CpuLayers):
            pytest.skip("layers are not computed in one call here")
        adapters.all_layers = adapters.layers if one_call else None
        engine = Engine(
            runner, None, config, adapters=open_adapters(decoder.config.spec, decoder.dtype, adapters.modules, config)
        )
        engine.adapters.load("a", save_adapter(tmp_path / "a", attention, rank=3, size=0.05))
        engine.adapters.load("all", save_adapter(tmp_path / "all", shapes, seed=1, size=0.05))
        for names in (("", "a"), ("a", "a"), ("all", "", "a")):
            found.append(answers(engine, [(each, list(range(5, 25))) for each in names], GREEDY))
            assert isinstance(adapters.layers, CpuLayers) == one_call
    first, second = found[:3], found[3:]
    assert first == second
    assert len({tuple(logprobs) for _, logprobs in first[2]}) == 3
