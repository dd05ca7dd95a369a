"""Weights that make keys and values from latents, packed, for compiled products (`latent_heads.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme, Weight
from compress.checkpoint.weights.coded import INT, CodedWeight
from compress.cpu.binding import BEST, absence, library, run_job, struct_fields
from runtime.backends.base import Target
from runtime.backends.latent import LatentHeads, LatentShape, attend_absorbed, expands
from runtime.backends.span_attention import attend_span, attend_tokens

LANES, LONGEST_LATENT = 16, 512


class _Weights(ctypes.Structure):
    """`LatentHeads` of latent_heads.h."""

    _fields_ = struct_fields("int64 heads own value_dim rank group bits", "pointer codes scales zeros")


class _Product(ctypes.Structure):
    """`LatentProduct` of latent_heads.h."""

    _fields_ = struct_fields(
        "pointer weights",
        "int64 rows",
        "pointer from_",
        "int64 from_row from_head",
        "pointer to",
    )


class CpuLatentHeads:
    """As `LatentHeads`, from packed integers. All tensors are bfloat16 on the CPU, and a row's products depend on that
    row alone.

    Raises:
        ValueError: an instruction set that this machine lacks, when it is called.
    """

    def __init__(self, weight: CodedWeight, shape: LatentShape, scale: float, instruction_set: int = BEST) -> None:
        self.shape, self.scale, self._instruction_set = shape, scale, instruction_set
        bits = _bits(weight.scheme)
        self._kept = (
            _arranged(weight.qweight, bits),
            weight.scales.float().contiguous(),
            weight.zero_points.contiguous(),
        )
        group = shape.rank // weight.scales.shape[1]
        sizes = shape.heads, shape.own, shape.value_dim, shape.rank, group, bits
        self._weights = _Weights(*sizes, *(part.data_ptr() for part in self._kept))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._kept)

    def rotated(self, query: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        own = self.shape.own
        return torch.cat((query[..., :own], rotate(query[..., own:])), -1)

    def expands(self, num_queries: int, num_keys: int, rotated: int) -> bool:
        return expands(num_queries, num_keys, self.shape.own, rotated, self.shape.value_dim, self.shape.rank)

    def attend_span(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        if self.expands(len(query), len(key), key.shape[-1]):
            return self.unpacked().attend_span(query, key, latent, mask)
        return attend_absorbed(self, attend_span, query, key, latent, mask)

    def attend_tokens(self, query: Tensor, key: Tensor, latent: Tensor, mask: Tensor | None) -> Tensor:
        return attend_absorbed(self, attend_tokens, query, key, latent, mask)

    def split(self, query: Tensor) -> tuple[Tensor, Tensor]:
        own = self.shape.own
        absorbed = query.new_empty(len(query), self.shape.heads, self.shape.rank)
        self._run("absorb_queries", query[..., :own], absorbed)
        return absorbed.transpose(0, 1), query[..., own:]

    def values(self, attended: Tensor) -> Tensor:
        rows = attended.transpose(0, 1)
        out = attended.new_empty(len(rows), self.shape.heads, self.shape.value_dim)
        self._run("latent_values", rows, out)
        return out

    def unpacked(self) -> LatentHeads:
        """Returns the weights as dense matrices."""
        heads, own, value_dim, rank = (getattr(self.shape, name) for name in ("heads", "own", "value_dim", "rank"))
        out = torch.empty(heads, own + value_dim, rank, dtype=torch.bfloat16)
        self._call("unpack_latent_heads", _Product(rows=heads, to=out.data_ptr()))
        key, value = out.split((own, value_dim), 1)
        return LatentHeads(key, value, self.scale)

    def _run(self, name: str, rows: Tensor, to: Tensor) -> None:
        """Calls a product of `rows [n, heads, *]`."""
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        self._call(name, _Product(None, len(rows), rows.data_ptr(), rows.stride(0), rows.stride(1), to.data_ptr()))

    def _call(self, name: str, product: _Product) -> None:
        product.weights = ctypes.addressof(self._weights)
        run_job(name, product, self._instruction_set)


def _arranged(codes: Tensor, bits: int) -> Tensor:
    """Arranges codes `[O, rank]` as bytes `[O, rank * bits / 8]`."""
    if bits == 8:
        return codes.contiguous()
    low, high = torch.unflatten(codes, 1, (-1, 2, LANES)).unbind(2)
    return (low | high << 4).flatten(1)


def _bits(scheme: Scheme) -> int:
    return 4 if scheme.bits <= 4 else 8


def heads_unsupported_reason(scheme: Scheme, rank: int, target: Target) -> str:
    """Why products cannot take a weight of this form; "" when they can."""
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return f"takes bfloat16 on CPUs, not {str(target.dtype).removeprefix('torch.')} on {target.device.type}"
    if library() is None:
        return absence()
    if not isinstance(scheme, Int):
        return f"takes plain integers, not {scheme}"
    group = scheme.group_size or rank
    fits = rank <= LONGEST_LATENT and rank % (2 * LANES) == 0 == group % (2 * LANES) and rank % group == 0
    return "" if fits else f"takes groups of a multiple of {2 * LANES} and up to {LONGEST_LATENT} columns"


def prepare_heads(weight: Weight, shape: LatentShape, scale: float) -> CpuLatentHeads:
    """Makes heads of a weight that is supported."""
    if not isinstance(weight, CodedWeight) or weight.scheme.numbers != INT:
        raise TypeError(f"{type(weight).__name__} are not plain integers")
    return CpuLatentHeads(weight, shape, scale)


def heads_nbytes(scheme: Scheme, rows: int, rank: int) -> int:
    """Bytes of such heads: codes, and a float32 scale and a zero point of a byte for each group."""
    return rows * (rank * _bits(scheme) // 8 + 5 * scheme.num_groups(rank))
