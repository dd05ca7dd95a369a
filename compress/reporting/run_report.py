"""`compression_report.json` as data: what was done, to what, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_measured import KVCacheRecord
from compress.layerwise import BlockShare
from compress.reporting.search_record import SearchRecord


@dataclass(frozen=True, slots=True)
class Linear:
    """What happened to one linear.

    Attributes:
        kind: its name inside its block, indices (experts) as `*`.
        relative_error: squared error of the weight over its square, each column weighted by its input.
        zeros: share of its weights that are zero by pruning.
        recovery: what was done instead where the method could not be applied; empty otherwise.
        input_outlier: as in `compress.pipeline.block_job.LinearRecord`; None where it was not recorded.
    """

    module: str
    kind: str
    method: str
    pruning: str
    relative_error: float
    zeros: float
    recovery: str
    input_outlier: float | None


@dataclass(frozen=True, slots=True)
class Smoothed:
    """One smoothing edge: what it read (inside its block), its exponent, and the loss without and with it."""

    kind: str
    exponent: float
    loss_before: float
    loss_after: float

    @property
    def gain(self) -> float:
        """Share of the loss that smoothing took away."""
        return 1 - self.loss_after / self.loss_before if self.loss_before > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block; `output_error` is None where its outputs were not computed."""

    name: str
    output_error: float | None
    linears: tuple[Linear, ...]
    smoothed: tuple[Smoothed, ...]


@dataclass(frozen=True, slots=True)
class PlannedKind:
    """Stored tensors that differ in nothing but their indices, and what became of them."""

    tensor: str
    shape: tuple[int, ...]
    count: int
    becomes: str
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity and divergence from the dense model; fields as in `compress.evaluate.perplexity.Evaluation`."""

    perplexity: float
    baseline_perplexity: float | None
    tokens: int
    kl_mean: float | None
    kl_p999: float | None
    kl_standard_error: float | None
    top1_agreement: float | None
    protocol: str
    data: str
    data_sha256: str
    backend: str
    dtype: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was re-read from the disk when the checkpoint was finished."""

    ok: bool
    format: str
    schemes: dict[str, str]
    bits_per_weight: float
    bits_per_parameter: float
    num_parameters: int
    num_packed: int
    total_bytes: int
    bit_compared: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVCacheFacts:
    """What the stage kv_cache chose; `record` is None where nothing was measured, `warning` is mostly empty."""

    default: KVCacheScheme
    warning: str
    record: KVCacheRecord | None

    @property
    def token_bytes(self) -> int | None:
        """Keys and values of one token in the chosen form; None where that was not measured."""
        found = self.record.find(self.default) if self.record else None
        return found.token_bytes if found else None


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole report.

    Attributes:
        folder: the checkpoint it lies in.
        name: the recipe's; its folder's where it has none.
        recipe, calibration, environment: as they stand in the file; calibration is empty for data-free methods.
        shares: how much of each block was pruned, where a first pass decided it; in the order of the blocks.
        quality: None when it was not measured; `not_measured` says why.
        search: how its schemes were found; None where a recipe gave them.
    """

    path: Path
    name: str
    source: str
    tool: str
    seed: int
    seconds: float
    recipe: dict[str, Any]
    calibration: dict[str, Any]
    environment: dict[str, Any]
    kinds: tuple[PlannedKind, ...]
    bytes_before: int
    notes: tuple[str, ...]
    blocks: tuple[Block, ...]
    shares: tuple[BlockShare, ...]
    verification: Verification
    quality: Quality | None
    not_measured: str
    kv_cache: KVCacheFacts | None = None
    search: SearchRecord | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def linears(self) -> list[Linear]:
        return [linear for block in self.blocks for linear in block.linears]
