"""Matrices whose rows are looked up by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import Blocks
from compress.checkpoint.weights.packing import pack_bits, unpack_bits
from runtime.backends.base import Linear, NormWeights, Ops, RowSource, Target


class Embedding(Protocol):
    """A matrix `[V, H]` whose rows are looked up."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds; 0 where the output head holds them."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Copies rows `[T, H]` of int64 `token_ids [T]` in the activation dtype."""


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    """A dense matrix; a memory-mapped weight stays mapped."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)


class PackedEmbedding:
    """A matrix of codes, packed as stored; looked-up rows are dequantized."""

    def __init__(self, weight: CodedWeight, target: Target) -> None:
        self.scheme, self.dtype = weight.scheme, target.dtype
        self.hidden_size = weight.shape[1]
        # One byte per code needs no packing and is faster to read.
        codes = weight.qweight if self.scheme.bits == 8 else pack_bits(weight.qweight, self.scheme.bits, 1)
        self.codes, self.scale = codes.to(target.device), weight.scales.to(target.device)
        self.zero = None if weight.zeros is None else weight.zeros.to(target.device)
        self.nbytes = self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def __call__(self, token_ids: Tensor) -> Tensor:
        codes, scale = self.codes.index_select(0, token_ids), self.scale.index_select(0, token_ids)
        if self.scheme.bits != 8:
            codes = unpack_bits(codes, self.scheme.bits, self.hidden_size, 1)
        zero = None if self.zero is None else self.zero.index_select(0, token_ids)
        return CodedWeight(codes, scale, self.scheme, zeros=zero).dequantize(self.dtype)


class BlockEmbedding:
    """A matrix of blocks as GGUF files have them; looked-up rows are dequantized."""

    def __init__(self, weight: CodedWeight, scheme: Blocks, target: Target) -> None:
        self.scheme, self.dtype = scheme, target.dtype
        self.blocks = scheme.blocks(weight).to(target.device)
        self.nbytes = self.blocks.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.scheme.from_blocks(self.blocks.index_select(0, token_ids)).dequantize(self.dtype)


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """A view of the output head, which holds the matrix for both."""

    head: RowSource
    dtype: torch.dtype
    nbytes = 0

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.head.rows(token_ids, self.dtype)


Rows = CodedWeight | Tensor
"""Weight whose rows can be looked up."""


def make_embedding(weight: Rows, target: Target) -> Embedding:
    """Makes the embedding of a weight `[V, H]`."""
    if isinstance(weight, Tensor):
        return DenseEmbedding(weight.to(target.device, target.dtype))
    if isinstance(weight.scheme, Blocks):
        return BlockEmbedding(weight, weight.scheme, target)
    return PackedEmbedding(weight, target)


@dataclass(frozen=True, slots=True)
class LayerInputsWeights:
    """Weights of `LayerInputs`."""

    embedding: Embedding
    projection: Linear
    norm: NormWeights

    @property
    def nbytes(self) -> int:
        return self.embedding.nbytes + self.projection.nbytes

    def __call__(self, token_ids: Tensor, hidden: Tensor, ops: Ops) -> Tensor:
        """Computes rows `[T, layers, size]` of int64 `token_ids [T]`, embedded as `hidden [T, H]`."""
        shape, root = (len(hidden), -1, len(self.norm.weight)), len(self.norm.weight) ** 0.5
        looked_up = self.embedding(token_ids).view(shape)
        looked_up = looked_up * torch.tensor(root, dtype=hidden.dtype)
        projected = self.projection(hidden).view(shape) * hidden.shape[-1] ** -0.5
        return (ops.normalize(projected, self.norm) + looked_up) * 2**-0.5
