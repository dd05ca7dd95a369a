"""Draft models made of the target itself. They share its embedding, norms at the ends, head and rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compress.checkpoint.errors import ToolkitError
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.rounded import RoundedCheckpoint
from compress.checkpoint.scheme import GROUP_SIZES, Scheme
from runtime.model.decoder import Decoder
from runtime.model.load import load_layers
from runtime.model.tensors import HEAD, expected_linears


def skip_layers(target: Decoder, num_skipped: int | None = None) -> Decoder:
    """The target without some of its layers, spread evenly between the first and the last, which stay.

    A residual network's middle layers each change the hidden state a little, so what is left still predicts something
    (Zhang et al.: Draft & Verify, arXiv:2309.08168, section 3).

    Args:
        num_skipped: None leaves out half of them.

    Raises:
        ToolkitError: fewer than one layer is skipped, or the first and last would have to be.
    """
    count = len(target.layers)
    skipped = count // 2 if num_skipped is None else num_skipped
    if not 1 <= skipped <= count - 2:
        raise ToolkitError(
            f"{skipped} of {count} layers cannot be skipped: the first and the last stay",
            f"Use --speculate self:skip=N with N from 1 to {count - 2}" if count > 2 else "Use another drafter",
        )
    # Kept layers at even distances, from the first to the last.
    kept = [round(index * (count - 1) / (count - skipped - 1)) for index in range(count - skipped)]
    windows = tuple(target.config.windows[index] for index in kept)
    config = replace(target.config, num_layers=len(kept), windows=windows)
    return replace(target, config=config, layers=[target.layers[index] for index in kept])


def round_layers(target: Decoder, path: str | Path, bits: int, kernels: str = "auto") -> Decoder:
    """The target with the linears of its layers rounded to `bits` bits: in asymmetric groups as small as fit, without
    calibration, in seconds. The checkpoint in folder `path` is read once more; nothing is written.

    Raises:
        ToolkitError: the weights are that small already.
    """
    source = PackedCheckpoint.open(path)
    modules = [module for module, _, _ in expected_linears(target.config, source) if module != HEAD]
    schemes = {module: _scheme(source, module, bits) for module in modules}
    layers, description = load_layers(RoundedCheckpoint.of(source, schemes), target, kernels)
    return replace(target, layers=layers, description=tuple(description))


def _scheme(source: PackedCheckpoint, module: str, bits: int) -> Scheme:
    stored, (rows, columns) = source.scheme(module), source.shape(module)
    if stored is not None and _taken(stored, rows, columns) <= bits:
        raise ToolkitError(
            f"{module} has {_taken(stored, rows, columns):g} bits already, so {bits} bits make no faster draft",
            "Use --speculate self:skip, ngram, or fewer bits",
        )
    return Scheme(bits, next((size for size in GROUP_SIZES if columns % size == 0), None), symmetric=False)


def _taken(stored: Scheme, rows: int, columns: int) -> float:
    """Bits of a weight. Factors of low rank are multiplied out for a draft, so what counts is what both take."""
    return stored.bits if stored.rank is None else stored.stored_bits(rows, columns) / (rows * columns)
