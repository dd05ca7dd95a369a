"""Statistics of a linear's inputs are those after smoothing."""

import pytest
import torch

from calibration.statistics import InputStatistics
from compress.checkpoint.weights import NM, Int, NMSparsity
from compress.methods import base
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.compress_layer import LayerCompressor, values_of
from compress.plan import LayerPlan, Pruning


@pytest.mark.parametrize("method", [None, "awq"])
def test_sparsegpt_sees_smoothed_inputs(method: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    inputs = torch.randn(512, 64, generator=generator) + torch.randn(512, 1, generator=generator)
    statistics = InputStatistics(64, sample_rows=512)
    statistics.update(inputs)
    # Uneven, so that the inputs before smoothing say something quite different.
    scale = torch.logspace(-0.5, 0.5, 64)[torch.randperm(64, generator=generator)]
    pattern = NMSparsity(2, 4)
    scheme = NM(None, pattern) if method is None else NM(Int(8, 32), pattern)
    assignment = LayerPlan(
        method and base.QUANTIZATION.find(method), scheme, pruning=Pruning(base.PRUNING.find("sparsegpt"), pattern, 0.5)
    )

    def error(scale: torch.Tensor | None) -> float:
        folded = weight if scale is None else weight * scale
        cache = HessianCache(statistics, scale)
        stored, _ = LayerCompressor.of("q", folded, assignment, torch.float32, cache).apply()
        found = values_of(stored) if scale is None else values_of(stored) / scale
        return float((inputs @ (found - weight).T).square().mean())

    assert error(scale) < 1.3 * error(None)
