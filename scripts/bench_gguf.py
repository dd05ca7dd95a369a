"""Quality of GGUF files of one mix and size: those of `compress export` next to those of llama.cpp's quantizer.

All files are made of one dense file and scored by the runtime in float32 on their dequantized values: KL to the dense
model. Methods choose the codes of the same mix, as `compress export --method` does. llama.cpp is used through
llama-cpp-python, and left out where that is not installed. Examples:

    python scripts/bench_gguf.py
    python scripts/bench_gguf.py --types q4_0 q3_k_m --methods gptq awq --data wikitext2_test.txt --tokens 16384
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarking.machine import open_console
from benchmarking.models import compress
from benchmarking.tables import Row, print_with_markdown

from compress.checkpoint.gguf.export import Planner, export_gguf
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.mixes import MIXES
from compress.checkpoint.locate import find_model
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.gguf_recipe import stages_of
from compress.recipe import CalibrationOptions


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments, __doc__, ("q4_0", "q4_k_m", "q3_k_m"), ("gptq", "awq"))
    model, rows = find_model(options.model), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name, file in quantized_files(Path(folder), model, options.types, options.methods):
            result = run_evaluation(
                EvaluationRequest(
                    folder_of(file), model, options.data, max_tokens=options.tokens, device="cpu", dtype="float32"
                )
            ).result
            figures = {"perplexity": f"{result.perplexity:.2f}", "KL to dense": f"{result.kl_mean:.5f}"}
            rows.append({"file": name, "bytes": f"{file.stat().st_size:,}", **figures})
    console = open_console()
    print_with_markdown(f"GGUF files, {options.data}", rows, console)
    return 0


def parse_options(
    arguments: Sequence[str] | None, documentation: str, types: Sequence[str], methods: Sequence[str]
) -> argparse.Namespace:
    """Parses the command line of a comparison of files, with its default types and methods."""
    parser = argparse.ArgumentParser(description=documentation.split("\n", 1)[0])
    parser.add_argument("--model", default="demo", help="dense model folder or bundled model")
    parser.add_argument("--types", nargs="+", choices=MIXES, default=types)
    parser.add_argument("--methods", nargs="*", default=methods, help="methods that choose codes inside of the types")
    parser.add_argument("--data", default="pydoc", help="text that is scored")
    parser.add_argument("--tokens", type=int, default=16384)
    return parser.parse_args(arguments)


def quantized_files(
    folder: Path, model: Path, types: Sequence[str], methods: Sequence[str] = ("gptq",)
) -> Iterator[tuple[str, Path]]:
    """Yields a name and a file for each way to each type."""
    dense = export_gguf(model, folder / "dense.gguf").path
    for kind in types:
        if find_spec("llama_cpp"):
            from benchmarking.llama import quantize

            yield f"{kind}, llama.cpp", quantize(dense, folder / f"llama-{kind}.gguf", MIXES[kind].number)
        yield f"{kind}, compress export", export_gguf(model, folder / f"{kind}.gguf", kind).path
        for method in methods:
            packed = _quantize(model, folder / f"{kind}-{method}", method, kind)
            yield f"{kind}, {method}", export_gguf(packed, folder / f"{kind}-{method}.gguf", kind).path


def _quantize(model: Path, out: Path, method: str, kind: str) -> Path:
    stages = stages_of(Planner.open(model, kind).chosen_types(), method)
    compress(model, out, list(stages), CalibrationOptions())
    return out


if __name__ == "__main__":
    sys.exit(main())
