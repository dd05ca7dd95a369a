"""On the trained model, calibrated and measured on different texts: which method stays nearer to the dense model.

`scripts/bench_quality.py` measures the same with more tokens and seeds, and keeps the margins.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from runs import compared_with, compress, with_outliers

from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.common.cli import bundled_path, demo_model_path
from compress.recipe import CalibrationOptions
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage


@dataclass(frozen=True)
class Ordering:
    """Methods, the nearest one to the dense model first, and between two of them how much nearer one must be.

    Attributes:
        text: samples and their length for calibration; tokens and length of windows for measuring.
    """

    text: tuple[int, int, int, int]
    chain: tuple[Stage | tuple[Stage, ...] | float, ...]
    outliers: bool = False
    model: str = "demo"


def quantized(better: str, worse: str, scheme: Scheme, factor: float, text: tuple[int, int, int, int]) -> Ordering:
    return Ordering(text, (QuantizeStage(better, scheme), factor, QuantizeStage(worse, scheme)))


LONG = (32, 512, 16384, 512)
W4, PATTERN = Int(4, 64), NMSparsity(2, 4)
FULL = {
    "2:4": Ordering(
        (24, 256, 4096, 256),
        (PruneStage("sparsegpt", PATTERN), 0.7, PruneStage("wanda", PATTERN), 1, PruneStage("magnitude", PATTERN)),
    ),
    "ranks": Ordering(
        (8, 256, 2048, 256),
        (
            *(FactorizeStage("svd-llm", 0.8, "block"), 0.8, FactorizeStage("svd-llm", 0.8, "uniform"), 0.7),
            *(FactorizeStage("asvd", 0.8, "uniform"), 1, FactorizeStage("svd", 0.8, "uniform")),
        ),
    ),
    "shares of blocks": Ordering(
        (16, 256, 2048, 256),
        (PruneStage("wanda", sparsity=0.7, layerwise="owl"), 0.9, PruneStage("wanda", sparsity=0.7)),
    ),
    "rotation of outliers": Ordering(
        (32, 512, 1024, 512),
        ((RotateStage(), QuantizeStage("rtn", Int(4, None))), 0.6, QuantizeStage("rtn", Int(4, None))),
        outliers=True,
    ),
    "experts": Ordering(
        (8, 512, 4096, 512),
        (QuantizeStage("gptq", W4), 0.9, QuantizeStage("awq", W4), 0.95, QuantizeStage("rtn", W4)),
        model="demo-mixture",
    ),
}
SLOW = {
    **{
        f"signround {s}": quantized("signround", "gptq", s, 0.9, (64, 512, 16384, 512))
        for s in (Int(3, 64), Int(2, 64))
    },
    **{f"gptaq {s}": quantized("gptaq", "gptq", s, 1, LONG) for s in (Int(3, 64), Int(2, 64))},
    **{
        f"rotation {method} {scheme}": Ordering(
            (32, 512, 8192, 512), ((RotateStage(), QuantizeStage(method, scheme)), 1, QuantizeStage(method, scheme))
        )
        for method in ("rtn", "gptq")
        for scheme in (Int(4, None), Int(3, None), Int(2, 64))
    },
}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in FULL),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_each_method_is_nearer_to_the_dense_model_than_the_next(name: str, tmp_path: Path) -> None:
    ordering = (FULL | SLOW)[name]
    samples, length, tokens, window = ordering.text
    dense = model = bundled_path(ordering.model)
    if ordering.outliers:
        model = with_outliers(model, tmp_path / "model", [3, 19, 40, 41, 90, 127], 32.0)
    divergences = []
    for number, stages in enumerate(ordering.chain[::2]):
        out, calibration = tmp_path / str(number), CalibrationOptions("bundled", samples=samples, length=length)
        stages = stages if isinstance(stages, tuple) else (stages,)
        compress(model, out, *stages, calibration=calibration, dtype="float32")
        divergences.append(compared_with(dense, out, tokens, window).kl_mean)
    for factor, (better, worse) in zip(ordering.chain[1::2], pairwise(divergences), strict=True):
        assert better < factor * worse, divergences


@pytest.mark.parametrize(
    ("scheme", "samples", "tokens"),
    [
        pytest.param(Int(3, 64), 8, 4096, marks=pytest.mark.full),
        *(pytest.param(Int(*s), 32, 16384, marks=pytest.mark.slow) for s in ((3, 64), (4, 64), (4, 128), (2, 64))),
    ],
    ids=str,
)
def test_calibrated_methods_beat_rounding_to_nearest(scheme: Scheme, samples: int, tokens: int, tmp_path: Path) -> None:
    calibration, found = CalibrationOptions("bundled", samples=samples, length=512), {}
    for method in ("rtn", "awq", "gptq"):
        out = tmp_path / method
        compress(demo_model_path(), out, QuantizeStage(method, scheme), calibration=calibration, dtype="float32")
        found[method] = compared_with(demo_model_path(), out, tokens, length=512)
    rtn, awq, gptq = found.values()
    for name in ("kl_mean", "perplexity"):
        assert getattr(gptq, name) < getattr(rtn, name)
        assert getattr(awq, name) <= getattr(rtn, name)
    assert rtn.perplexity > rtn.baseline_perplexity
