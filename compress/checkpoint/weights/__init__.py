"""What one packed module can hold."""

from __future__ import annotations

from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierWeight
from compress.checkpoint.weights.sparse_nm import PrunedWeight

CodedWeight = IntegerWeight | Fp8Weight
"""Codes `[O, I]` with scales: what one kernel multiplies by. Every tensor of it has a row for each output."""

PackedWeight = CodedWeight | PrunedWeight | LowRankWeight | OutlierWeight
"""All know their `scheme` and `shape`, can `dequantize`, and go to host memory with `cpu`."""
