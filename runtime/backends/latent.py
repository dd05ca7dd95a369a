"""Latent attention (arXiv:2405.04434, section 2.1) over gathered latents: plain torch, any dtype, any device.

Absorbed, every query head moves into the space of latents and attends to them as they are, all heads to one key.
Expanded, keys and values of all heads are computed from the latents first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.weights import Scheme, Weight
from runtime.backends.base import Target
from runtime.backends.span_attention import attend_span, attend_tokens

EXPANDED_NUMBERS = 2**26
"""Largest number of elements of the keys that are expanded at a time."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of the weights between latents and heads.

    Attributes:
        own: channels of a key without the rotated ones.
    """

    heads: int
    own: int
    value_dim: int
    rank: int


class LatentProducts(Protocol):
    """Weights that make keys and values of all heads from latents, and products with them; see `LatentHeads`."""

    @property
    def shape(self) -> LatentShape: ...
    @property
    def scale(self) -> float: ...
    @property
    def nbytes(self) -> int: ...

    def rotated(self, query: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor: ...
    def expands(self, num_queries: int, num_keys: int, rotated: int) -> bool: ...
    def attend_span(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor: ...
    def attend_tokens(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor: ...
    def split(self, query: Tensor) -> tuple[Tensor, Tensor]: ...
    def values(self, attended: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LatentHeadsKernel:
    """One way to multiply packed weights between latents and heads.

    Attributes:
        unsupported_reason: why it cannot take a scheme with this rank on a target; "" when it can.
        prepare: called once for each layer, with the factor on scores.
        nbytes: memory of prepared weights with this scheme, rows and rank.
    """

    unsupported_reason: Callable[[Scheme, int, Target], str]
    prepare: Callable[[Weight, LatentShape, float], LatentProducts]
    nbytes: Callable[[Scheme, int, int], int]


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Weights that make keys and values of all heads from latents of `rank` channels.

    Attributes:
        key: `[heads, K, rank]`, channels of keys without the rotated ones.
        value: `[heads, V, rank]`.
        scale: factor on scores.
    """

    key: Tensor
    value: Tensor
    scale: float

    @property
    def shape(self) -> LatentShape:
        return LatentShape(len(self.key), self.key.shape[1], self.value.shape[1], self.key.shape[2])

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def rotated(self, query: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `rotate` to the channels of queries `[..., K + R]` that look at rotated keys."""
        own = self.key.shape[1]
        return torch.cat((query[..., :own], rotate(query[..., own:])), -1)

    def expands(self, num_queries: int, num_keys: int, rotated: int) -> bool:
        """Whether a span with this many rotated channels expands its keys and values."""
        _, own, rank = self.key.shape
        return expands(num_queries, num_keys, own, rotated, self.value.shape[1], rank)

    def attend_span(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """A span of one sequence over its tokens.

        Args:
            query: `[n, heads, K + R]`.
            key, latent: `[L, 1, R]` and `[L, 1, rank]`.
            mask: additive `[n, L]`; None is causal and needs n == L.

        Returns:
            `[n, heads, V]`.
        """
        if self.expands(len(query), len(key), key.shape[-1]):
            return self._expand(query, key, latent, mask)
        return attend_absorbed(self, attend_span, query, key, latent, mask)

    def attend_tokens(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """q tokens of each of B sequences, one sequence after the other, absorbed.

        Args:
            query: `[B * q, heads, K + R]`.
            key, latent: `[B, L, 1, R]` and `[B, L, 1, rank]`.
            mask: additive `[B * q, L]`; None when every key counts.

        Returns:
            `[B * q, heads, V]`.
        """
        return attend_absorbed(self, attend_tokens, query, key, latent, mask)

    def split(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Splits queries `[n, heads, K + R]`: those that look at latents, `[heads, n, rank]`, and the channels `[n,
        heads, R]` that look at rotated keys."""
        own = self.key.shape[1]
        return torch.bmm(query[..., :own].transpose(0, 1), self.key), query[..., own:]

    def values(self, attended: Tensor) -> Tensor:
        """Values `[n, heads, V]` of sums of latents `[heads, n, rank]`."""
        return torch.bmm(attended, self.value.mT).transpose(0, 1)

    def _expand(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        """As `attend_span`, a few heads at a time."""
        width, value_dim = query.shape[-1], self.value.shape[1]
        size = max(1, EXPANDED_NUMBERS // (len(key) * max(width, value_dim)))
        weights = zip(query.split(size, 1), self.key.split(size), self.value.split(size), strict=True)
        parts = [self._expanded(q, k, v, key, latent, mask) for q, k, v in weights]
        return torch.cat(parts, 1)[..., :value_dim]

    def _expanded(
        self, query: Tensor, key_weight: Tensor, value_weight: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Computes some heads, filled with zeros up to the larger of key and value."""
        own, value = (torch.einsum("lr,hdr->lhd", latent[:, 0], weight) for weight in (key_weight, value_weight))
        keys = torch.cat((own, key.expand(-1, own.shape[1], -1)), -1)
        width = max(keys.shape[-1], value.shape[-1])
        query, keys, value = (functional.pad(part, (0, width - part.shape[-1])) for part in (query, keys, value))
        return attend_span(query, keys, value, mask, scale=self.scale)


def attend_absorbed(
    heads: LatentProducts,
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    latent: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Lets queries `[n, heads, K + R]` look at latents by `attend_span` or `attend_tokens`: values `[n, heads, V]`."""
    absorbed, rotated = heads.split(query)
    keys, queries = torch.cat((latent, key), -1), torch.cat((absorbed.transpose(0, 1), rotated), -1)
    attended = attend(queries, keys, keys, mask, scale=heads.scale)
    return heads.values(attended[..., : latent.shape[-1]].transpose(0, 1))


def expands(num_queries: int, num_keys: int, own: int, rotated: int, value_dim: int, rank: int) -> bool:
    """Whether a head takes fewer multiplications with expanded keys and values than absorbed.

    Args:
        own, rotated: channels of a key of its own, and of the rotated one that all heads share.
    """
    weights = (own + value_dim) * rank
    absorbed = num_queries * (weights + num_keys * 2 * (rank + rotated))
    return num_keys * weights + num_queries * num_keys * 2 * max(own + rotated, value_dim) < absorbed
