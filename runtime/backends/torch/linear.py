"""Linears that are not quantized: which product serves them, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.cpu.binding import absence
from compress.cpu.linear import INPUT_MULTIPLE, NativeLinear, padded_features
from runtime.backends.base import Linear, Target
from runtime.backends.cpu.linear import has_fast_torch_products, has_matrix_tiles, has_native_vectors


class DenseLinear:
    """`F.linear` with the weight as it is; a memory-mapped weight stays mapped."""

    reads_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.index_select(0, indices).to(dtype)


class PrepackedLinear:
    """oneDNN with the weight in its own blocked layout: up to twice as fast as `F.linear` for few rows on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed, self._bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class DenseKernel:
    """One way to multiply by a dense weight.

    Attributes:
        refuse: why it cannot serve this number of input features on this target; empty when it can.
        reads_rows: whether what it prepares can be looked up too (`RowSource`).
        padded: output features in memory for those of the weight.
    """

    name: str
    summary: str
    refuse: Callable[[int, Target], str]
    prepare: Callable[[Tensor, Tensor | None], Linear]
    reads_rows: bool
    padded: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class DenseChoice:
    """A kernel for a dense weight, and why it and none before it."""

    kernel: DenseKernel
    reason: str


def choose_dense(in_features: int, target: Target, *, reference: bool = False) -> DenseChoice:
    """The first kernel that can serve a dense weight; `reference` asks for plain `F.linear`."""
    if reference:
        return DenseChoice(PLAIN, f"asked for; {PLAIN.summary}")
    refusals: list[str] = []
    for kernel in (NATIVE, PREPACKED):
        refusal = kernel.refuse(in_features, target)
        if not refusal:
            return DenseChoice(kernel, "; ".join([kernel.summary, *refusals]))
        refusals.append(f"{kernel.name} {refusal}")
    return DenseChoice(PLAIN, "; ".join([PLAIN.summary, *refusals]))


def dense_linear(weight: Tensor, bias: Tensor | None, target: Target, *, reference: bool = False) -> Linear:
    """The best linear for a dense weight `[O, I]`; `reference` asks for plain `F.linear`."""
    kernel = choose_dense(weight.shape[1], target, reference=reference).kernel
    return kernel.prepare(weight.to(target.device, target.dtype), bias)


def _refuse_native(in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype != torch.bfloat16:
        return "holds bfloat16 numbers"
    if in_features % INPUT_MULTIPLE:
        return f"takes inputs that are a multiple of {INPUT_MULTIPLE}"
    if has_matrix_tiles():
        return "multiplies no matrix tiles (AMX), which oneDNN does on this CPU"
    return "" if has_native_vectors() else "has no vectors for this CPU"


def _refuse_prepacked(in_features: int, target: Target) -> str:
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return "multiplies bfloat16 numbers on CPUs"
    return "" if has_fast_torch_products(torch.bfloat16) else "has no bfloat16 products on this CPU"


def _as_they_are(out_features: int) -> int:
    return out_features


NATIVE = DenseKernel(
    "native", "bfloat16 numbers in C, float32 sums", _refuse_native, NativeLinear, True, padded_features
)
PREPACKED = DenseKernel("onednn", "oneDNN over its own layout", _refuse_prepacked, PrepackedLinear, False, _as_they_are)
PLAIN = DenseKernel("torch", "F.linear", lambda in_features, target: "", DenseLinear, True, _as_they_are)


@dataclass(frozen=True, slots=True)
class LowRank:
    """`x right^T left^T + bias`: the bias belongs to `left`."""

    right: Linear
    left: Linear

    @property
    def nbytes(self) -> int:
        return self.right.nbytes + self.left.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.left(self.right(x))


@dataclass(frozen=True, slots=True)
class WithOutliers:
    """`base(x without the columns) + x[:, columns] values^T`. Where inputs are rounded to 8 bits, their scale thus
    comes from the other columns alone, as LLM.int8() (arXiv:2208.07339) has it.

    Attributes:
        base: multiplies by the codes; the bias belongs to it.
        columns: int64 `[k]`.
        values: `[k, O]`, in the activation dtype.
    """

    base: Linear
    columns: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """The few column numbers are not counted."""
        return self.base.nbytes + self.values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rest = x.index_fill(1, self.columns, 0)
        return self.base(rest).addmm(x.index_select(1, self.columns), self.values)
