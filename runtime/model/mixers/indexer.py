"""Index queries, keys and weights of the lightning indexer (arXiv:2512.02556, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.mixers.attention import Attention
from compress.models.mixers.indexer import Indexer
from runtime.backends.base import Linear, NormWeights
from runtime.backends.indexer import IndexedTokens
from runtime.backends.model import LayerStep
from runtime.model.rotary import HeadRotation, channel_order
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Weights of an indexer.

    Attributes:
        rotated: channels of a head that rotate.
        weights: `[heads, H]`, of the weights of heads; at least float32.
        norm: of keys.
        rotation: of the first channels of each head.
    """

    indexer: Indexer
    rotated: int
    query: Linear
    key: Linear
    weights: Tensor
    norm: NormWeights
    rotation: HeadRotation

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.key.nbytes

    def read(self, x: Tensor, latent: Tensor, step: LayerStep) -> IndexedTokens:
        """Reads what attention reads, `x [T, H]`, and the normalized latents of queries `[T, rank]`."""
        heads, dim = self.indexer.num_heads, self.indexer.head_dim
        key = step.ops.normalize(self.key(x), self.norm).unsqueeze(1)
        both = torch.cat((self.query(latent).view(-1, heads, dim), key), 1)
        rotated, still = both.tensor_split([self.rotated], -1)
        both = torch.cat((self.rotation(rotated.contiguous(), step), still), -1)
        weights = functional.linear(x.to(self.weights.dtype), self.weights) * (heads * dim) ** -0.5
        return IndexedTokens(both[:, :heads], both[:, heads], weights, self.indexer.num_chosen)


def load_indexer(indexer: Indexer, mixer: Attention, rotated: int, block: WeightReader) -> IndexerWeights:
    """Loads the indexer of attention whose heads rotate `rotated` channels.

    Raises:
        ValueError: attention without a rotary embedding.
    """
    rotation = block.rotation(mixer.rotation)
    if rotation is None or mixer.rope is None:
        raise ValueError("an indexer needs a rotary embedding")
    order = channel_order(replace(mixer.rope, interleaved=indexer.interleaved), rotated)
    return IndexerWeights(
        indexer,
        rotated,
        block.linear(indexer.query),
        block.linear(indexer.key),
        block.vector(f"{indexer.weights.name}.weight", block.wide),
        block.norm(indexer.norm),
        replace(rotation, order=None if order is None else order.to(block.target.device)),
    )
