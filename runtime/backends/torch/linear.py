"""Linears that are not quantized: which product serves them, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from runtime.backends.backend import DenseKernel
from runtime.backends.base import Target


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """`F.linear` with the weight as it is; a memory-mapped weight stays mapped."""

    weight: Tensor
    bias: Tensor | None
    reads_rows = True

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

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
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed, self._bias, "none", [], "")


def _onednn_unsupported_reason(out_features: int, in_features: int, target: Target) -> str:
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return "multiplies bfloat16 numbers on CPUs"
    return "" if is_fast(torch.bfloat16) else "has no bfloat16 products on this CPU"


def _nbytes(out_features: int, in_features: int, target: Target) -> int:
    return out_features * in_features * target.dtype.itemsize


SEMI_STRUCTURED = "semi_structured"
FIRST_CAPABILITY = (8, 0)
SPARSE_ROW_MULTIPLE, SPARSE_INPUT_MULTIPLE = 32, 64
"""Multiples that both of PyTorch's backends (cuSPARSELt and CUTLASS) take, in bfloat16 and in float16."""
TOKEN_MULTIPLE = 8
"""Tokens are filled up to this with zeros."""
KEPT, OF = 2, 4
MULTIPLIED = f"2:4 zeros are multiplied too: few tokens are faster so (--linear-backend {SEMI_STRUCTURED} differs)"


class SemiStructuredLinear:
    """A weight `[O, I]` of which at most two of every four neighbouring inputs are not zero."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from torch.sparse import to_sparse_semi_structured

        self._weight = to_sparse_semi_structured(weight)
        self._bias = bias
        self.nbytes = semi_structured_bytes(*weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        padding = -len(x) % TOKEN_MULTIPLE
        padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
        return functional.linear(padded, self._weight, self._bias)[: len(x)]


def semi_structured_bytes(rows: int, columns: int) -> int:
    """Half of the values in 16 bits, and two bits for the place of each."""
    return rows * columns * 9 // 8


def is_two_of_four(weight: Tensor) -> bool:
    """Whether the zeros of a weight `[O, I]` allow it."""
    return weight.shape[1] % OF == 0 and bool(((weight.view(len(weight), -1, OF) != 0).sum(-1) <= KEPT).all())


def _semi_structured_unsupported_reason(out_features: int, in_features: int, target: Target) -> str:
    """ "" on GPUs with sparse tensor cores, for 16-bit weights whose features are a multiple of 32 and 64."""
    if target.device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits"
    if out_features % SPARSE_ROW_MULTIPLE or in_features % SPARSE_INPUT_MULTIPLE:
        return f"takes {SPARSE_ROW_MULTIPLE} rows and {SPARSE_INPUT_MULTIPLE} inputs, or a multiple"
    if _capability(target.device) < FIRST_CAPABILITY:
        return "needs sparse tensor cores (compute capability 8.0)"
    return ""


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _semi_structured_nbytes(out_features: int, in_features: int, target: Target) -> int:
    return semi_structured_bytes(out_features, in_features)


SPARSE = DenseKernel(
    SEMI_STRUCTURED,
    "2:4 values and their indices, sparse tensor cores",
    _semi_structured_unsupported_reason,
    SemiStructuredLinear,
    _semi_structured_nbytes,
    mode=SEMI_STRUCTURED,
    suits=is_two_of_four,
    note=MULTIPLIED,
)
ONEDNN = DenseKernel("onednn", "oneDNN over its own layout", _onednn_unsupported_reason, PrepackedLinear, _nbytes)
PLAIN = DenseKernel("torch", "F.linear", lambda outputs, inputs, target: "", DenseLinear, _nbytes, True)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this dtype in vectors on a CPU, be it in a wider one."""
    if dtype in (torch.float32, torch.float64):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    check = operators._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else operators._is_mkldnn_fp16_supported
    return bool(check())


def has_vector_nibbles() -> bool:
    """Whether the packed 4-bit product is vectorized (AVX2 or AVX-512)."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
