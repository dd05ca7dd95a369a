"""Adapters in C (`adapters.h`): each row computes the products of its own adapter alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, function, struct_fields
from runtime.backends.adapted_linear import AdaptedLinear, Factors, Places, StepAdapters
from runtime.backends.base import Linear, Target
from runtime.backends.cpu.linear import CpuLinear

LANES = 16


class _Adapters(ctypes.Structure):
    """`Adapters` of adapters.h."""

    _fields_ = struct_fields("int64 in_features out_features most_rank", "pointer down up parts starts")


class CpuAdaptedLinear(AdaptedLinear):
    """A `CpuLinear` with adapters in bfloat16. See `adapted_unsupported_reason`.

    Attributes:
        address: of the C structure, for compiled code that multiplies by itself.
    """

    base: CpuLinear

    def __init__(
        self, base: Linear, places: Places, step: StepAdapters, target: Target, instruction_set: int = BEST
    ) -> None:
        super().__init__(base, places, step, target)
        self._run = function("adapters_add", c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int)
        self._instruction_set, self._kept = instruction_set, (torch.empty(0), torch.empty(0))
        self._adapters = _Adapters(in_features=self.base.in_features, out_features=self.base.out_features)
        self.address = ctypes.addressof(self._adapters)

    def fill(self, adapters: Sequence[Mapping[str, Factors]]) -> None:
        super().fill(adapters)
        ranks = [sum(part.rank for part in self.parts if part.slot == slot) for slot in range(len(adapters))]
        counts = [sum(part.slot < slot for part in self.parts) for slot in range(len(adapters) + 1)]
        table = [(part.first, part.rank, part.begin, part.end - part.begin) for part in self.parts]
        self._kept = torch.tensor(table, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
        self._adapters.most_rank = max(ranks)
        addresses = (tensor.data_ptr() for tensor in (self.down, self.up, *self._kept))
        self._adapters.down, self._adapters.up, self._adapters.parts, self._adapters.starts = addresses

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Raises ToolkitError: no memory, or not the instruction set that was asked for."""
        slots, x = self.step.of_rows(len(x)), x.contiguous()
        where = slots.data_ptr(), len(x), x.data_ptr(), out.data_ptr()
        if self._run(self.address, *where, self._instruction_set):
            reason = "this machine lacks the instruction set, or is out of memory"
            raise ToolkitError(f"compiled adapters failed: {reason}", "Use --linear-backend reference")
        return out


def adapters_of(linears: Iterable[Linear]) -> StepAdapters | None:
    """Returns the adapters of the steps of a model whose linears are adapted; None for others."""
    return next((linear.step for linear in linears if isinstance(linear, CpuAdaptedLinear)), None)


def adapted_unsupported_reason(linear: Linear, places: Places, target: Target) -> str:
    """Why adapters of a linear are not added in C; "" when they are."""
    if not isinstance(linear, CpuLinear) or target.dtype != torch.bfloat16:
        return "takes linears in C, and bfloat16"
    sizes = linear.in_features, *(place for _, begin, end in places for place in (begin, end))
    return "takes sizes that 16 divides" if any(each % LANES for each in sizes) else ""
