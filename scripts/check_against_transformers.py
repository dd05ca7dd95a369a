"""Compares the runtime's logits of a checkpoint, dense or packed, with those of transformers.

    python scripts/check_against_transformers.py CHECKPOINT
    python scripts/check_against_transformers.py CHECKPOINT --layers 6 --dtype float64 --tokens 200

Only the first layers are copied and computed, so that large models fit in memory: choose as many as show every kind of
layer. Prints the largest difference; exits with status 1 when it is above the tolerance, 2 when a side cannot compute.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compress.checkpoint.config import read_config, write_config
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import ToolkitError
from compress.evaluate.scorers import BACKENDS, open_scorer

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
"""Names of the number of layers."""


def first_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns a config.json, or a part of one, with no more layers and with lists by layer as long as there are."""
    count = next((config[key] for key in COUNTS if isinstance(config.get(key), int)), None)
    shorter: dict[str, Any] = {}
    for key, value in config.items():
        if key in COUNTS and isinstance(value, int):
            value = min(value, layers)
        elif isinstance(value, list) and len(value) == count:
            value = value[:layers]
        elif key == "text_config" and isinstance(value, Mapping):
            value = first_layers(value, layers)
        shorter[key] = value
    return shorter


def copy_first_layers(checkpoint: Path, out: Path, layers: int) -> Path:
    """Writes the checkpoint without the tensors of later layers. Raises CheckpointError where it cannot be read."""
    files = TensorFiles.open(checkpoint)
    found = {name: LAYER.search(name) for name in files.names()}
    kept = [name for name, layer in found.items() if layer is None or int(layer[1]) < layers]
    out.mkdir()
    save_file({name: files.tensor(name).contiguous() for name in kept}, out / "model.safetensors", {"format": "pt"})
    write_config(out, first_layers(read_config(checkpoint), layers))
    return out


def largest_difference(checkpoint: Path, dtype: str, num_tokens: int, vocab_size: int) -> tuple[float, float]:
    """Returns the largest difference of logits, and the standard deviation of those of transformers."""
    tokens = torch.randint(vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    found, expected = (
        open_scorer(checkpoint, backend, device="cpu", dtype=dtype).logits(tokens) for backend in BACKENDS
    )
    return float((found - expected).abs().max()), float(expected.std())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="in standard deviations of the logits")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints and returns the exit status."""
    options = parse(arguments)
    try:
        config = read_config(options.checkpoint)
        vocab_size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        with tempfile.TemporaryDirectory() as work:
            shorter = copy_first_layers(options.checkpoint, Path(work) / "model", options.layers)
            difference, spread = largest_difference(shorter, options.dtype, options.tokens, vocab_size)
    except ToolkitError as error:
        print(error, file=sys.stderr)
        return 2
    share, is_same = difference / spread, difference <= options.tolerance * spread
    print(
        f"{options.layers} layers, {options.tokens} tokens, {options.dtype}: "
        f"largest difference of logits {difference:.2e}"
    )
    print(
        f"{share:.2e} of their standard deviation {spread:.3g}, "
        f"{'within' if is_same else 'ABOVE'} {options.tolerance:g}"
    )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
