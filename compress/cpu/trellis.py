"""The compiled search for trellis codes; `c/trellis/search.h` defines it."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p

import torch
from torch import Tensor

from compress.cpu.binding import BEST, function, struct_fields


class _Search(ctypes.Structure):
    """`TrellisSearch` of search.h."""

    _fields_ = struct_fields("int64 tiles", "int32 pair_bits", "pointer numbers values states")


def search_states(values: Tensor, numbers: Tensor, pair_bits: int, instruction_set: int = BEST) -> Tensor:
    """Returns the states int32 `[N, 256]` of the cyclic streams with the least squared error. Raises ValueError: the
    library is not built, or this machine lacks the instruction set; MemoryError.

    Args:
        values: float32 `[N, 256]` on the CPU, in the order of the stream.
        numbers: float32 `[65536]`, the number of each state.
        pair_bits: of two codes, 2 to 16; the first of them has half of these, rounded down.
    """
    values, numbers = values.contiguous(), numbers.contiguous()
    states = torch.empty(values.shape, dtype=torch.int16)
    search = _Search(len(values), pair_bits, numbers.data_ptr(), values.data_ptr(), states.data_ptr())
    status = function("trellis_search", c_void_p, c_int)(ctypes.byref(search), instruction_set)
    if status == -2:
        raise MemoryError(f"the search for codes of {pair_bits / 2:g} bits is out of memory")
    if status:
        raise ValueError(f"trellis_search cannot run with instruction set {instruction_set}")
    return states.to(torch.int32) & 0xFFFF
