"""Routers of mixtures: tokens that other experts are chosen for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from torch import Tensor

    from compress.evaluate.side import Side
    from runtime.backends.base import Ops
    from runtime.backends.model import Layer

TOKENS, LENGTH = 4096, 512


@dataclass(frozen=True, slots=True)
class Routes:
    """Chosen experts by the name of the layer: `[T, k]` int16, in order of their index."""

    chosen: dict[str, Tensor]


class RouterFlips(MeasuredFigure):
    """Share of (token, layer) whose set of chosen experts is another one than in the dense model."""

    help = "share of tokens and layers for which a mixture chooses other experts"
    word = "at most"
    usual = 0.25

    def observe(self, side: Side) -> Routes:
        import torch

        from calibration.sequences import load_tokenizer
        from calibration.sources import load_texts
        from compress.evaluate.perplexity import cut_windows

        spec = side.config.spec
        if not any(block.mixture for block in spec.blocks):
            return Routes({})
        length = min(LENGTH, side.config.default_length)
        windows = cut_windows(load_texts("pydoc"), load_tokenizer(side.folder), length=length, max_tokens=TOKENS)
        chosen: dict[int, list[Tensor]] = {}
        side.hidden_states([*windows.tokens], partial(_recording, chosen))
        ordered = {spec.block_name(index): torch.cat(parts).sort(-1).values for index, parts in chosen.items()}
        return Routes({name: experts.to(torch.int16).cpu() for name, experts in ordered.items()})

    def judge(self, dense: Routes, packed: Routes) -> Finding:
        if not dense.chosen:
            return Finding.nothing("no layer is a mixture")
        differing = {name: (packed.chosen[name] != experts).any(-1) for name, experts in dense.chosen.items()}
        by_layer = {name: float(each.double().mean()) for name, each in differing.items()}
        most = max(by_layer, key=lambda name: by_layer[name])
        tokens = len(next(iter(differing.values())))
        text = f"{len(by_layer)} layers, {tokens:,} tokens; most in {most}: {by_layer[most]:.4g}"
        return Finding(sum(by_layer.values()) / len(by_layer), text, details={"layers": by_layer, "tokens": tokens})


def _recording(chosen: dict[int, list[Tensor]], index: int, layer: Layer, ops: Ops) -> Layer:
    """Returns a layer that adds the experts it chooses to `chosen`."""
    from runtime.backends.mlp import MLPAndMixture

    experts = layer.experts
    if experts is None:
        return layer

    def compute(x: Tensor, routed: Tensor | None = None) -> Tensor:
        weights, found = experts.route(x if routed is None else routed)
        chosen.setdefault(index, []).append(found)
        return experts.weighted(x, weights, found, ops) if experts.kernel is None else experts.kernel(x, routed)

    recording = replace(experts, kernel=compute)
    if isinstance(layer.mlp, MLPAndMixture):
        return replace(layer, mlp=replace(layer.mlp, mixture=recording))
    return replace(layer, mlp=recording)


FIGURES.register("routers", order=7)(RouterFlips())
