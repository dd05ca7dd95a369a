"""One of two models that are compared by what they do: its answers, and its states layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.config import read_config
from compress.common.errors import ToolkitError
from compress.common.evaluation import Finding
from compress.common.files import read_json
from compress.evaluate.figures.base import FIGURES, MeasuredFigure
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.backends.base import Ops
    from runtime.backends.model import Layer
    from runtime.model.streamed import StreamedModel


class Generate(Protocol):
    """Greedy decoding by one model."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Returns the tokens after each prompt, up to an end token or `max_tokens`."""


Watch = Callable[[int, "Layer", "Ops"], "Layer"]
"""Returns a layer (by its index) that does the same, and records."""


@dataclass
class Side:
    """A model as it is served.

    Attributes:
        load: loads the checkpoint of a folder whole, and returns its greedy decoding.
        options: of `runtime.model.streamed.StreamedModel.open`.
    """

    folder: Path
    load: Callable[[Path], Generate]
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.folder)

    @cached_property
    def config(self) -> DecoderConfig:
        generation = self.folder / "generation_config.json"
        return parse_config(read_config(self.folder), read_json(generation) if generation.exists() else None)

    @cached_property
    def generate(self) -> Generate:
        return self.load(self.folder)

    @cached_property
    def layers(self) -> StreamedModel:
        """The model of which one layer is in memory at a time."""
        from runtime.model.streamed import StreamedModel

        return StreamedModel.open(self.folder, **self.options)

    @torch.inference_mode()
    def hidden_states(self, texts: Sequence[Tensor], watch: Watch = lambda _index, layer, _ops: layer) -> list[Tensor]:
        """Passes texts, int64 `[T]` each, through one layer after the other; returns hidden states `[T, H]`."""
        from runtime.model.streamed import advance, begin

        model = self.layers
        decoder = model.with_embedding()
        passes = [begin(decoder, text.unsqueeze(0)) for text in texts]
        for index in range(model.num_layers):
            decoder = model.with_layer(index)
            layers = [*decoder.layers]
            layers[index] = watch(index, layers[index], decoder.ops)
            decoder = replace(decoder, layers=layers)
            for text, partial in zip(texts, passes, strict=True):
                advance(decoder, text.unsqueeze(0).to(decoder.device), partial)
            model.release()
        return [each.passing.finish() for each in passes]

    @torch.inference_mode()
    def log_probabilities(self, texts: Sequence[Tensor], places: Sequence[slice]) -> Iterator[Tensor]:
        """Yields log-probabilities `[N, V]` of the next token at some places of each text, int64 `[T]`."""
        hidden = self.hidden_states(texts)
        decoder = self.layers.with_head()
        for states, part in zip(hidden, places, strict=True):
            yield decoder.logits(states[part]).log_softmax(-1).cpu()


def measure_figures(
    names: Sequence[str], dense: Side, packed: Side, on_progress: Callable[[str, int, int], None]
) -> dict[str, Finding]:
    """Measures figures by observing one model after the other. A figure that cannot be measured says why.

    Args:
        on_progress: called with (what is done, steps done, steps in all).
    """
    wanted = {name: figure for name in names if isinstance(figure := FIGURES.find(name), MeasuredFigure)}
    seen: list[dict[str, Any]] = []
    failed: dict[str, Finding] = {}
    for side, word in ((dense, "dense"), (packed, "packed")):
        observed: dict[str, Any] = {}
        for name, figure in wanted.items():
            if name in failed:
                continue
            on_progress(f"{name} of the {word} model", len(seen) * len(wanted) + len(observed), 2 * len(wanted))
            try:
                observed[name] = figure.observe(side)
            except ToolkitError as error:
                failed[name] = Finding(None, f"not measured: {error}")
        seen.append(observed)
        vars(side).pop("generate", None)  # one whole model in memory at a time
    judged = {name: wanted[name].judge(seen[0][name], seen[1][name]) for name in seen[1]}
    return {name: (judged | failed)[name] for name in wanted}
