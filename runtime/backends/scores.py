"""Changes of the scores of attention, and attention of whole sequences with them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from runtime.backends.indexer import ChosenTokens, IndexedTokens, choose_in_spans
from runtime.backends.latent import LatentProducts
from runtime.backends.span_attention import attend_span, visibility_mask


@dataclass(frozen=True, slots=True)
class LayerScores:
    """Changes of the scores of one layer: see `Scores`."""

    softcap: float | None = None
    chunk: int | None = None
    sink_logits: Tensor | None = None


PLAIN_LAYER = LayerScores()


@dataclass(frozen=True, slots=True)
class Scores:
    """Changes of a model's scores in addition to the windows of its layers.

    Attributes:
        softcap: see `attend`.
        chunks: of every layer, tokens of a chunk, of which a token sees its own only; None is one chunk.
        sink_logits: of every layer, see `add_sink_key`.
        latents: of every layer, what makes keys and values of latents.
        index_sources: of every layer, the one whose indexer chooses what it sees; -1 for none.
    """

    softcap: float | None = None
    chunks: tuple[int | None, ...] = ()
    sink_logits: tuple[Tensor | None, ...] = ()
    latents: tuple[LatentProducts | None, ...] = ()
    index_sources: tuple[int, ...] = ()

    def seen(self, windows: tuple[int | None, ...]) -> list[tuple[int | None, int | None]]:
        """Window and chunk of every layer."""
        return list(zip(windows, self.chunks or (None,) * len(windows), strict=True))

    def sinks(self, layer: int) -> Tensor | None:
        """The sink logits of a layer."""
        return self.sink_logits[layer] if self.sink_logits else None

    def latent(self, layer: int) -> LatentProducts | None:
        """Weights that make keys and values of the latents of a layer."""
        return self.latents[layer] if self.latents else None

    def of(self, layer: int) -> LayerScores:
        """Those of one layer."""
        if self.softcap is None and not self.chunks and not self.sink_logits:
            return PLAIN_LAYER
        return LayerScores(self.softcap, self.chunks[layer] if self.chunks else None, self.sinks(layer))


PLAIN_SCORES = Scores()


class DenseAttention:
    """Causal attention inside each of B sequences of length T that lie one after the other on the token axis.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(
        self,
        length: int,
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        self.length, self.scores, self.dtype = length, scores, dtype
        positions = torch.arange(length, device=device)
        seen = scores.seen(windows)
        masks = {each: self.mask(positions, *each) for each in set(seen)}
        self.masks, self.chosen = [masks[each] for each in seen], ChosenTokens[Tensor | None](scores.index_sources)

    def mask(self, positions: Tensor, window: int | None, chunk: int | None) -> Tensor | None:
        """Builds the additive mask `[T, T]`; None where the causal one suffices."""
        if min(window or self.length, chunk or self.length) >= self.length:
            return None
        return visibility_mask(positions, self.length, window, self.dtype, chunk=chunk)

    def choose(self, layer: int, tokens: IndexedTokens) -> None:
        self.chosen.put(layer, choose_in_spans(tokens, self.length, self.masks[layer], self.dtype))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spans = zip(query.split(self.length), key.split(self.length), value.split(self.length), strict=True)
        if (latent := self.scores.latent(layer)) is not None:
            masks = self.chosen.of(layer) or repeat(self.masks[layer])
            return torch.cat([latent.attend_span(*span, mask) for span, mask in zip(spans, masks, strict=False)])
        options = self.masks[layer], self.scores.softcap, self.scores.sinks(layer)
        return torch.cat([attend_span(q, k, v, *options) for q, k, v in spans])
