"""Quality of GGUF files of one type and size: those of `compress export` beside those of llama.cpp's quantizer.

All files are made of one dense file and scored by the runtime in float32 on their dequantized values: KL to the dense
model. Methods choose codes that a type holds as they are: `--bits 4 --group-size 32` for `q4_0`, `--weights q4_k` for a
K type. llama.cpp's small mix `q4_k` has 5 bits for a few matrices; methods choose the codes of the same mix.
llama.cpp is used through llama-cpp-python, and left out where that is not installed. Examples:

    python scripts/bench_gguf.py
    python scripts/bench_gguf.py --types q4_0 q3_k --methods gptq awq --data wikitext2_test.txt --tokens 16384
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarking.machine import environment
from benchmarking.models import compress
from benchmarking.tables import Row, describe, print_with_markdown
from rich.console import Console

from compress.checkpoint.gguf.export import GGUF_TYPES, export_gguf
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.locate import find_model
from compress.checkpoint.weights import Q2K, Q3K, Q4K, Q5K, Q6K, Int, Iq4Nl, Q4Minima, Q5Minima, Scheme
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.recipe import CalibrationOptions, QuantizeStage

LLAMA_FILE_TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q3_k": 11,
    "q4_k": 14,
    "q5_k": 16,
    "q6_k": 18,
}
LLAMA_FILE_TYPES |= {"iq4_nl": 25}
"""Numbers of llama.cpp's mixes without an importance matrix; of K types the small ones."""
EXACT: dict[str, Scheme] = {
    **{f"q{bits}_0": Int(bits, 32) for bits in (4, 5, 8)},
    **{scheme.word: scheme for scheme in (Q2K(), Q3K(), Q4K(), Q5K(), Q6K(), Q4Minima(), Q5Minima(), Iq4Nl())},
}
"""Forms of weights that a type holds as they are."""
METHODS = ("gptq", "awq")
VALUES, DOWN = "self_attn.v_proj", "mlp.down_proj"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
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
    console = Console()
    console.print(describe(environment()))
    print_with_markdown(f"GGUF files, {options.data}", rows, console)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="demo", help="dense model folder or bundled model")
    parser.add_argument("--types", nargs="+", choices=GGUF_TYPES, default=["q4_0", "q4_k", "q3_k"])
    parser.add_argument("--methods", nargs="*", default=METHODS, help="methods that choose codes inside of a type")
    parser.add_argument("--data", default="pydoc", help="text that is scored")
    parser.add_argument("--tokens", type=int, default=16384)
    return parser.parse_args(arguments)


def quantized_files(
    folder: Path, model: Path, types: Sequence[str], methods: Sequence[str] = ("gptq",)
) -> Iterator[tuple[str, Path]]:
    """Yields a name and a file for each way to each type."""
    dense = export_gguf(model, folder / "dense.gguf").path
    for kind in types:
        if kind in LLAMA_FILE_TYPES and find_spec("llama_cpp"):
            yield f"{kind}, llama.cpp", _quantize_with_llama(dense, folder / f"llama-{kind}.gguf", kind)
        yield f"{kind}, compress export", export_gguf(model, folder / f"{kind}.gguf", kind).path
        for method in methods:
            packed = _quantize(model, folder / f"{kind}-{method}", method, kind)
            yield f"{kind}, {method}", export_gguf(packed, folder / f"{kind}-{method}.gguf", kind).path


def _quantize_with_llama(dense: Path, out: Path, kind: str) -> Path:
    """Quantizes in a process of its own, which may write to the terminal. Raises CalledProcessError when it fails."""
    code = (
        "import sys, llama_cpp as l; p = l.llama_model_quantize_default_params(); p.ftype = int(sys.argv[3]); "
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    command = [sys.executable, "-c", code, str(dense), str(out), str(LLAMA_FILE_TYPES[kind])]
    subprocess.run(command, check=True, capture_output=True)
    return out


def _quantize(model: Path, out: Path, method: str, kind: str) -> Path:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    compress(model, out, stages_of(kind, method, layers), CalibrationOptions())
    return out


def stages_of(kind: str, method: str, layers: int) -> list[QuantizeStage]:
    """Returns the stages that give each matrix of a model the type that it has in llama.cpp's small mix."""
    stages = [QuantizeStage(method, EXACT[kind])]
    if kind == "q4_k":
        more = [(VALUES, number) for number in range(min(4, layers))] + [
            (DOWN, number) for number in range(layers // 8)
        ]
        targets = tuple(f"model.layers.{number}.{name}" for name, number in more)
        stages.append(QuantizeStage(method, Q5K(), targets=targets))
    return stages


if __name__ == "__main__":
    sys.exit(main())
