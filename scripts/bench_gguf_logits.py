"""Quality of GGUF files by the logits that llama.cpp computes from them, next to those of llama.cpp's own quantizer.

All files are made of one dense file. KL is to the logits of the dense model in float32; the last columns compare with
the runtime on the dequantized values of the same file: positions where both rank the same token first, and texts whose
greedy tokens are the same. The importance matrix of llama.cpp's quantizer is measured on the text with which methods
are calibrated. Needs llama-cpp-python. Examples:

    python scripts/bench_gguf_logits.py --data wikitext2_test.txt
    python scripts/bench_gguf_logits.py --types q4_0 --tokens 4096
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bench_gguf import parse_options, quantized_files
from benchmarking.llama import LlamaScorer, importance_matrix, quantize
from benchmarking.machine import open_console
from benchmarking.tables import Row, print_with_markdown
from torch import Tensor

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.mixes import MIXES
from compress.checkpoint.locate import find_model
from compress.evaluate.perplexity import Windows, cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.recipe import CalibrationOptions

LENGTH, PROMPT, CONTINUED = 512, 16, 32
"""Tokens of a window, of a prompt, and of its greedy continuation."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments, __doc__, ("q4_0", "q4_k_m", "q3_k_m", "q5_k_m"), ("gptq", "gptaq"))
    model, rows = find_model(options.model), list[Row]()
    windows = cut_windows(load_texts(options.data), load_tokenizer(model), length=LENGTH, max_tokens=options.tokens)
    dense = _open(model)
    with tempfile.TemporaryDirectory() as folder:
        for name, file in _files(Path(folder), model, options.types, options.methods):
            rows.append({"file": name, "bytes": f"{file.stat().st_size:,}", **_figures(file, windows, dense)})
            print(*rows[-1].values(), sep="  ", file=sys.stderr)
    console = open_console()
    print_with_markdown(f"GGUF files by llama.cpp's logits, {options.data}", rows, console)
    return 0


_open = partial(RuntimeScorer, device="cpu", dtype="float32")


def _files(folder: Path, model: Path, types: Sequence[str], methods: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yields a name and a file for each way to each type, the dense file first."""
    importance, dense = importance_matrix(model, CalibrationOptions()), folder / "dense.gguf"
    for number, (name, file) in enumerate(quantized_files(folder, model, types, methods)):
        if number == 0:
            yield "dense, compress export", dense
        yield name, file
        kind = name.partition(",")[0]
        if name == f"{kind}, llama.cpp":
            out = folder / f"importance-{kind}.gguf"
            yield f"{name}, importance matrix", quantize(dense, out, MIXES[kind].number, importance)


def _figures(file: Path, windows: Windows, dense: RuntimeScorer) -> Row:
    theirs, ours = LlamaScorer(file, windows.tokens.shape[1]), _open(folder_of(file))
    to_dense, to_ours = evaluate(theirs, windows, dense), evaluate(theirs, windows, ours)
    texts = [_Text.of(theirs, ours, row[:PROMPT].tolist()) for row in windows.tokens]
    return {
        "perplexity": f"{to_dense.perplexity:.2f}",
        "KL to dense": f"{to_dense.kl_mean:.5f}",
        "+-": f"{to_dense.kl_standard_error or 0:.5f}",
        "same first token": f"{100 * (to_ours.top1_agreement or 0):.2f} %",
        "same texts": f"{sum(text.is_same for text in texts)} of {len(texts)}",
        "same tokens": f"{sum(text.same_tokens for text in texts)} of {len(texts) * CONTINUED}",
    }


@dataclass(frozen=True, slots=True)
class _Text:
    """A greedy continuation of llama.cpp, compared with the runtime's.

    Attributes:
        same_tokens: tokens before the first one that the runtime chooses differently.
    """

    same_tokens: int

    @classmethod
    def of(cls, theirs: LlamaScorer, ours: RuntimeScorer, prompt: list[int]) -> _Text:
        text: Tensor = torch.tensor([theirs.continue_greedily(prompt, CONTINUED)])
        chosen = ours.logits(text)[0, PROMPT - 1 : -1].argmax(-1)
        return cls(int((chosen == text[0, PROMPT:]).cumprod(0).sum()))

    @property
    def is_same(self) -> bool:
        return self.same_tokens == CONTINUED


if __name__ == "__main__":
    sys.exit(main())
