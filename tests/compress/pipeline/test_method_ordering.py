"""On a trained model, calibrated and evaluated on different texts: GPTQ < RTN and AWQ <= RTN.

`scripts/bench_quality.py` measures the same with more tokens and seeds, and keeps the margins.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import demo_model_path
from compress.evaluate.perplexity import Evaluation, Windows, cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, QuantizeStage, Recipe


class Remembered:
    """The dense model's logits, computed once."""

    def __init__(self, path: Path) -> None:
        self._scorer = RuntimeScorer(path, dtype="float32")
        self._logits: dict[bytes, Tensor] = {}

    def logits(self, tokens: Tensor) -> Tensor:
        key = tokens.numpy().tobytes()
        if key not in self._logits:
            self._logits[key] = self._scorer.logits(tokens)
        return self._logits[key]


@pytest.fixture(scope="module")
def dense() -> Remembered:
    return Remembered(demo_model_path())


def measure(method: str, scheme: Scheme, samples: int, windows: Windows, dense: Remembered, out: Path) -> Evaluation:
    calibration = CalibrationOptions("bundled", samples=samples, length=512)
    recipe = Recipe((QuantizeStage(method, scheme),), calibration, seed=0)
    request = RunRequest(demo_model_path(), "demo", recipe, out / method, dtype="float32", measure=False)
    run(prepare(request), quiet=True)
    return evaluate(RuntimeScorer(out / method, dtype="float32"), windows, dense)


@pytest.mark.parametrize(
    ("scheme", "samples", "num_tokens"),
    [
        pytest.param(Int(3, 64), 8, 4096, marks=pytest.mark.full),
        pytest.param(Int(3, 64), 32, 16384, marks=pytest.mark.slow),
        pytest.param(Int(4, 64), 32, 16384, marks=pytest.mark.slow),
        pytest.param(Int(4, 128), 32, 16384, marks=pytest.mark.slow),
        pytest.param(Int(2, 64), 32, 16384, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_calibrated_methods_beat_rounding_to_nearest(
    scheme: Scheme, samples: int, num_tokens: int, dense, tmp_path: Path
) -> None:
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(demo_model_path()), length=512, max_tokens=num_tokens)
    rtn, awq, gptq = (measure(method, scheme, samples, windows, dense, tmp_path) for method in ("rtn", "awq", "gptq"))
    assert gptq.kl_mean < rtn.kl_mean
    assert gptq.perplexity < rtn.perplexity
    assert awq.kl_mean <= rtn.kl_mean
    assert awq.perplexity <= rtn.perplexity
    assert rtn.perplexity > rtn.baseline_perplexity
