"""Learned rounding inside block types of GGUF: its start, its values, and what learning gives."""

from pathlib import Path

import pytest
import torch
from runs import compress
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Nf4, Nvfp4, Q4Minima, Q5Minima, Scheme
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import RecipeError
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.hessian import factorize
from compress.methods.shared.learned_blocks import LearnedBlocks
from compress.methods.shared.learned_rounding import LARGEST_OFFSET, learn
from compress.methods.signround import SignRoundOptions
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage

ALL = Q2K(), Q3K(), Q4K(), Q5K(), Q6K(), Q4Minima(), Q5Minima()
STEPS = 60


def random_weight(rows: int = 12, columns: int = 256) -> Tensor:
    weight = 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    weight[3, :32] = 0
    return weight


def correlated_inputs(tokens: int = 384, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, 16, generator=generator) @ torch.randn(16, columns, generator=generator)
    return features / 4 + 0.3 * torch.randn(tokens, columns, generator=generator)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_begins_with_the_values_it_is_given(scheme: Blocks) -> None:
    weight, inputs = random_weight(), correlated_inputs()
    start = quantize_gptq(weight, factorize(inputs.T @ inputs), scheme)
    rounding = LearnedBlocks(weight, start)
    assert torch.equal(rounding.values(), start.dequantize())
    assert torch.equal(rounding.codes().dequantize(), start.dequantize())


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_its_values_are_those_of_its_blocks_wherever_it_is(scheme: Blocks) -> None:
    rounding, generator = (
        LearnedBlocks(random_weight(), scheme.round(random_weight())),
        torch.Generator().manual_seed(5),
    )
    begin = rounding.state()
    for _ in range(3):
        rounding.descend(torch.randn(rounding.offset.shape, generator=generator), 0.3)
        assert float(rounding.offset.detach().abs().max()) <= LARGEST_OFFSET
        blocks = scheme.blocks(rounding.codes())
        assert torch.equal(rounding.values(), scheme.from_blocks(blocks).dequantize())
    rounding.restore(begin)
    assert torch.equal(rounding.values(), scheme.round(random_weight()).dequantize())


@pytest.mark.parametrize("scheme", [Q3K(), Q4K(), Q4Minima()], ids=str)
def test_learning_lowers_the_error(scheme: Blocks) -> None:
    weight, inputs = random_weight(), correlated_inputs()
    rounding = LearnedBlocks(weight, scheme.round(weight))

    def error() -> float:
        return float(((rounding.values() - weight) @ inputs.T).square().sum())

    def gradients(_step: int) -> list[Tensor]:
        return [2 * (rounding.values() - weight) @ inputs.T @ inputs]

    found = learn([rounding], gradients, error, STEPS, 1 / STEPS)
    assert found.loss_after < 0.8 * found.loss_before
    assert error() == found.loss_after
    assert all(float((each.detach() - 1).abs().max()) > 0 for each in rounding.stretch if each.numel())


@pytest.mark.parametrize("scheme", [Iq4Nl(), Nf4(), Nvfp4()], ids=str)
def test_floats_and_levels_are_refused(scheme: Scheme) -> None:
    with pytest.raises(RecipeError, match=f"signround does not support {scheme}: it learns integers"):
        QuantizeStage("signround", scheme)


def test_a_run(tiny_model, tmp_path: Path) -> None:
    model, options = tiny_model(hidden_size=256, intermediate_size=256, head_dim=64), SignRoundOptions(4, 0.1, 1)
    stage, calibration = QuantizeStage("signround", Q4K(), options=options), CalibrationOptions(samples=2, length=32)
    assert compress(model, tmp_path / "packed", stage, calibration=calibration).structure.ok
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {Q4K()}
