"""Quantizes the demo model with GPTQ and evaluates the result: `python examples/compress_and_evaluate.py OUT`."""

import sys
from pathlib import Path

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage


def main(out: Path) -> None:
    recipe = Recipe((QuantizeStage("gptq", Int(4, 128)),), CalibrationOptions(samples=8, length=256))
    model = demo_model_path()
    result = run(prepare(RunRequest(model, str(model), recipe, out, measure=False)))
    report = run_evaluation(EvaluationRequest(out, model, max_tokens=2048))
    print(f"{result.out}: KL {report.result.kl_mean:.4f}, perplexity {report.result.perplexity:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "packed-example"))
