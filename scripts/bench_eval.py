"""Time and memory of `compress eval` with both models in memory and with `--stream`, in turn, and their figures.

A dense model of random weights is the baseline of one with random codes, or the demo model of itself. Every row is
measured in a process of its own, so its peak memory is its own; mapped pages of the files are among it. Where other
work shares the processor, trust CPU seconds. Examples:

    python scripts/bench_eval.py --shape demo --tokens 16384
    OMP_NUM_THREADS=1 python scripts/bench_eval.py --shape 1.1b --tokens 4096
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarking.machine import Stopwatch, in_own_process, leave_with, open_console, peak_host_bytes
from benchmarking.models import SHAPES, write_model, write_packed_model
from benchmarking.tables import print_with_markdown

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.evaluation import Evaluation
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.evaluate.streamed import Streaming


@dataclass(frozen=True)
class Cost:
    """One evaluation."""

    result: Evaluation
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(model: Path, baseline: Path, tokens: int, dtype: str, folder: Path | None) -> Cost:
    """Evaluates once; `folder` is for hidden states, None for both models in memory."""
    watch = Stopwatch()
    streaming = None if folder is None else Streaming(folder)
    request = EvaluationRequest(model, baseline, max_tokens=tokens, dtype=dtype, streaming=streaming)
    return Cost(run_evaluation(request).result, *watch.read(), peak_host_bytes())


def write_models(work: Path, shape: str) -> tuple[Path, Path]:
    """Returns the folders of a model and its baseline."""
    if shape == "demo":
        return demo_model_path(), demo_model_path()
    in_own_process(write_model, work / "dense", SHAPES[shape])
    in_own_process(write_packed_model, work / "packed", SHAPES[shape], Int(4, 128))
    return work / "packed", work / "dense"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo", choices=("demo", "tiny", "125m", "1.1b", "8b"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="auto", help="of activations")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder for models; default: a temporary one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    console = open_console(shape=options.shape, tokens=options.tokens)
    rows, results = [], set[Evaluation]()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        model, baseline = write_models(Path(work), options.shape)
        for _ in range(options.rounds):
            for name, folder in (("in memory", None), ("--stream", Path(work) / "hidden")):
                cost = in_own_process(measure, model, baseline, options.tokens, options.dtype, folder)
                results.add(cost.result)
                rows.append(
                    {
                        "evaluation": name,
                        "seconds": f"{cost.seconds:.1f}",
                        "CPU seconds": f"{cost.cpu_seconds:.1f}",
                        "peak RSS MB": f"{cost.peak_bytes / 1e6:,.0f}",
                    }
                )
                console.print(f"  {name}: {cost.seconds:.1f} s")
    print_with_markdown("One process for each row", rows, console)
    console.print("same figures" if len(results) == 1 else f"figures differ: {results}")
    return 0 if len(results) == 1 else 1


if __name__ == "__main__":
    leave_with(main)
