"""What one packed module can hold."""

from __future__ import annotations

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import LowRankWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.pruned import PrunedWeight

PackedWeight = IntegerWeight | PrunedWeight | LowRankWeight | OutlierWeight
"""All know their `scheme` and `shape`, can `dequantize`, and go to host memory with `cpu`."""
