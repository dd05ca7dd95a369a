"""Statistics of a linear layer's inputs: second moments, magnitudes and sample rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from compress.common.errors import NumericsError

# Below this width the upper triangle of X^T X is one product; above it the redundant half is skipped by halving.
_TRIANGLE_LEAF = 256
# Elements per magnitude pass on a CPU: they stay in its cache.
_CACHED_ELEMENTS = 1 << 17


class InputStatistics:
    """Accumulates statistics of a linear's inputs `x [..., I]` over batches.

    All sums are float32 and independent of the device's TF32 setting.

    Args:
        hessian: whether to accumulate `X^T X`, which takes `I * I` floats and most of the time.
        sample_rows: maximum number of rows kept for losses that need real inputs.
    """

    def __init__(
        self,
        in_features: int,
        name: str = "",
        *,
        hessian: bool = True,
        sample_rows: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.in_features = in_features
        self.name = name
        self.count = 0
        self._second_moment = torch.zeros(in_features, in_features, device=device) if hessian else None
        self._absolute_sum = torch.zeros(in_features, device=device)
        self._square_sum = torch.zeros(in_features, device=device)
        self._largest = torch.zeros(in_features, device=device)
        self._rows = RowSample(sample_rows)

    def update(self, inputs: Tensor) -> None:
        """Adds a batch `[..., I]` of any float dtype. Raises NumericsError: NaN or infinity in the batch, which is then
        not counted."""
        rows = inputs.detach().reshape(-1, self.in_features)
        rows32 = rows.float()
        absolute, largest, squares = _magnitudes(rows32)
        self._refuse_non_finite(absolute, rows)
        self._absolute_sum += absolute
        self._largest = torch.maximum(self._largest, largest)
        self._square_sum += squares
        if self._second_moment is not None:
            with full_float32():
                _add_upper_gram(self._second_moment, rows32, rows32)
        self._rows.update(rows)
        self.count += len(rows)

    def add(self, later: InputStatistics) -> None:
        """Adds statistics of later batches, from any device."""
        device = self._absolute_sum.device
        if self._second_moment is not None and later._second_moment is not None:
            self._second_moment += later._second_moment.to(device)
        self._absolute_sum += later._absolute_sum.to(device)
        self._square_sum += later._square_sum.to(device)
        self._largest = torch.maximum(self._largest, later._largest.to(device))
        self._rows.add(later._rows.to(device))
        self.count += later.count

    def to(self, device: torch.device) -> InputStatistics:
        """Returns the same statistics on `device`."""
        if self._absolute_sum.device == device:
            return self
        there = copy.copy(self)
        there._second_moment = None if self._second_moment is None else self._second_moment.to(device)
        there._absolute_sum, there._square_sum = self._absolute_sum.to(device), self._square_sum.to(device)
        there._largest, there._rows = self._largest.to(device), self._rows.to(device)
        return there

    @property
    def hessian(self) -> Tensor:
        """`[I, I]` float32: `2 X^T X / count`, symmetric."""
        if self._second_moment is None:
            raise ValueError("these statistics were built without a Hessian")
        full = self._second_moment.triu()
        full += full.triu(1).T
        return full.mul_(2.0 / max(self.count, 1))

    @property
    def device(self) -> torch.device:
        return self._absolute_sum.device

    @property
    def abs_mean(self) -> Tensor:
        """`[I]` float32: mean magnitude of each input."""
        return self._absolute_sum / max(self.count, 1)

    @property
    def abs_max(self) -> Tensor:
        """`[I]` float32: largest magnitude of each input."""
        return self._largest

    @property
    def mean_square(self) -> Tensor:
        """`[I]` float32: mean square of each input, half of diag(H)."""
        return self._square_sum / max(self.count, 1)

    def sample(self, rows: int) -> Tensor:
        """Returns at most `rows` inputs `[n, I]`, evenly spread over the stream, in their own dtype."""
        return self._rows.take(rows)

    def _refuse_non_finite(self, absolute: Tensor, rows: Tensor) -> None:
        if torch.isfinite(absolute.sum()):
            return
        bad = int((~torch.isfinite(rows)).sum())
        where = f" of {self.name}" if self.name else ""
        raise NumericsError(
            f"the inputs{where} hold {bad} NaN or infinite values of {rows.numel()}, after {self.count} good tokens",
            "Run the model in float32 or bfloat16, or check the source checkpoint for broken weights",
        )


class RowSample:
    """Every n-th row of a stream, n doubling as it grows: independent of how rows are batched."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stride = 1
        self._seen = 0
        self._kept: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        if not self._capacity:
            return
        first = -self._seen % self._stride
        self._seen += len(rows)
        self._kept.append(rows[first :: self._stride].clone())
        self._thin()

    def add(self, later: RowSample) -> None:
        """Adds the sample of a later stream; both keep every n-th row with the larger n."""
        for sample, other in ((self, later), (later, self)):
            if sample._kept and sample._stride < other._stride:
                sample._kept = [torch.cat(sample._kept)[:: other._stride // sample._stride].clone()]
                sample._stride = other._stride
        self._seen += later._seen
        self._kept += later._kept
        self._thin()

    def to(self, device: torch.device) -> RowSample:
        """Returns the same sample on `device`."""
        there = copy.copy(self)
        there._kept = [rows.to(device) for rows in self._kept]
        return there

    def _thin(self) -> None:
        while sum(map(len, self._kept)) > 2 * self._capacity:
            self._stride *= 2
            self._kept = [torch.cat(self._kept)[::2].clone()]

    def take(self, rows: int) -> Tensor:
        if not self._kept:
            raise ValueError("these statistics were built without sample rows")
        kept = torch.cat(self._kept)
        picks = torch.linspace(0, len(kept) - 1, min(rows, len(kept)), device=kept.device).round().long()
        return kept[picks]


def _magnitudes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of magnitudes, the largest magnitude and the sum of squares of each column of `rows [T, I]`."""
    absolute, largest, squares = (torch.zeros(rows.shape[1], device=rows.device) for _ in range(3))
    for part in rows.split(len(rows) if rows.is_cuda else max(1, _CACHED_ELEMENTS // rows.shape[1])):
        magnitudes = part.abs()
        absolute += magnitudes.sum(0)
        largest = torch.maximum(largest, magnitudes.amax(0))
        squares += magnitudes.square_().sum(0)
    return absolute, largest, squares


@contextmanager
def full_float32() -> Iterator[None]:
    """Computes float32 products in full precision, even where the process allows TF32 (10 bits)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _add_upper_gram(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left^T right` to `total`; on the diagonal (left is right) only the upper triangle, in blocks."""
    width = total.shape[0]
    if left is not right or width <= _TRIANGLE_LEAF:
        total.addmm_(left.T, right)
        return
    half = width // 2
    first, second = left[:, :half], left[:, half:]
    _add_upper_gram(total[:half, :half], first, first)
    _add_upper_gram(total[:half, half:], first, second)
    _add_upper_gram(total[half:, half:], second, second)


class InputDifference:
    """Accumulates `D^T X` over batches: `X` the inputs in the quantized model, `X + D` those in the dense one."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._moment = torch.zeros(in_features, in_features, device=device)
        self.count = 0

    def add(self, later: InputDifference) -> None:
        """Adds the moments of later batches, from any device."""
        self._moment += later._moment.to(self._moment.device)
        self.count += later.count

    def to(self, device: torch.device) -> InputDifference:
        """Returns the same moments on `device`."""
        if self._moment.device == device:
            return self
        there = copy.copy(self)
        there._moment = self._moment.to(device)
        return there

    def update(self, inputs: Tensor, dense: Tensor) -> None:
        """Adds a batch: `inputs [..., I]` and, at the same tokens, `dense [..., I]`. Raises ValueError: the shapes
        differ, so the tokens do."""
        if inputs.shape != dense.shape:
            raise ValueError(f"inputs {tuple(inputs.shape)} and {tuple(dense.shape)} are not of the same tokens")
        rows = inputs.detach().reshape(-1, self._moment.shape[0]).float()
        change = dense.detach().reshape(rows.shape).float() - rows
        with full_float32():
            self._moment.addmm_(change.T, rows)
        self.count += len(rows)

    @property
    def moment(self) -> Tensor:
        """`[I, I]` float32: `2 D^T X / count`, rows of D; the unit of `InputStatistics.hessian`."""
        return self._moment * (2.0 / max(self.count, 1))
