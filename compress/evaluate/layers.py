"""Relative error of hidden states after each block, of two models whose layers are in memory one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.common.errors import DataError
from compress.evaluate.positions import standard_error

if TYPE_CHECKING:
    from runtime.model.streamed import PartialPass, StreamedModel


@dataclass(frozen=True, slots=True)
class LayerError:
    """Difference of two models after a block.

    Attributes:
        relative_error: mean over windows of the squared distance of their hidden states, relative to those of the
            reference.
        standard_error: over windows; None for a single one.
    """

    block: str
    relative_error: float
    standard_error: float | None


def layer_errors(
    reference: Path,
    model: Path,
    tokens: Tensor,
    options: dict[str, Any],
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[LayerError]:
    """Passes windows `[N, T]` through both models, block by block. Hidden states of all windows are in memory. Raises
    DataError: the models have different blocks.

    Args:
        options: of `StreamedModel.open`.
        on_progress: called with (blocks done, blocks in all).
    """
    from runtime.model.streamed import StreamedModel, begin

    models = [StreamedModel.open(path, **options) for path in (reference, model)]
    _check_alike(*models)
    decoders = [each.with_embedding() for each in models]
    passes = [[begin(decoder, window.unsqueeze(0)) for decoder in decoders] for window in tokens]
    del decoders
    found = []
    for index in range(models[0].num_layers):
        distances = _advance(models, index, tokens, passes)
        block = models[0].config.spec.block_name(index)
        found.append(LayerError(block, float(distances.mean()), standard_error(distances)))
        on_progress(index + 1, models[0].num_layers)
    return found


def _check_alike(reference: StreamedModel, model: StreamedModel) -> None:
    shapes = [(each.num_layers, each.config.spec.hidden_size) for each in (reference, model)]
    if shapes[0] != shapes[1]:
        (first, wide), (second, other) = shapes
        problem = f"the reference has {first} blocks of {wide} channels and the model {second} of {other}"
        raise DataError(problem, "Leave --by-layer out, or name two forms of one model")


def _advance(
    models: Sequence[StreamedModel], index: int, tokens: Tensor, passes: Sequence[Sequence[PartialPass]]
) -> Tensor:
    """Computes one block of each model for every window; returns relative errors float64 `[N]`."""
    from runtime.model.streamed import advance

    for side, model in enumerate(models):
        decoder = model.with_layer(index)
        for window, pair in zip(tokens, passes, strict=True):
            advance(decoder, window.unsqueeze(0).to(decoder.device), pair[side])
        del decoder
        model.release()
    return torch.stack([_distance(*pair) for pair in passes])


def _distance(reference: PartialPass, model: PartialPass) -> Tensor:
    exact, other = (_hidden(each).double().cpu() for each in (reference, model))
    return (other - exact).square().sum() / exact.square().sum()


def _hidden(partial: PartialPass) -> Tensor:
    """Returns hidden states `[T, H]`, without an effect on the pass."""
    passing = partial.passing
    return replace(passing, hidden=passing.hidden.clone()).finish()
