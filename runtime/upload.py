"""Numbers from the host to a device, without waiting for what runs there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor


def upload(integers: Iterable[int], device: torch.device) -> Tensor:
    """int64 `[n]`. An array in between is several times faster than a list."""
    numbers = array("q", integers)
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    return to_device(torch.frombuffer(numbers, dtype=torch.int64), device)


def upload_columns(
    integers: Sequence[Sequence[int]], floats: Sequence[Sequence[float]], device: torch.device
) -> list[Tensor]:
    """Columns of equally many numbers in one transfer: int64 `[n]` each, then float64 `[n]` each."""
    packed = array("q", chain.from_iterable(integers))
    packed.frombytes(array("d", chain.from_iterable(floats)).tobytes())
    columns = to_device(torch.frombuffer(packed, dtype=torch.int64), device).chunk(len(integers) + len(floats))
    return [*columns[: len(integers)], *(column.view(torch.float64) for column in columns[len(integers) :])]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; itself on a CPU. It goes through pinned memory, which torch does not reuse
    before the copy is done: from other memory a copy waits for all that the device has to do."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
