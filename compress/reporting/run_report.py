"""`compression_report.json` as data: what was done, to what, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.export import REPORT_FILE
from compress.reporting.fields import Fields
from compress.targets import without_indices

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Linear:
    """What happened to one linear.

    Attributes:
        kind: its name inside its block, indices (experts) as `*`.
        relative_error: squared error of the weight over its square, each column weighted by its input.
        zeros: share of its weights that are zero by pruning.
        recovery: what was done instead where the method could not be applied; empty otherwise.
        input_outlier: largest input over the median of the channels' largest; None where it was not recorded.
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
class RunReport:
    """A whole report.

    Attributes:
        folder: the checkpoint it lies in.
        name: the recipe's; its folder's where it has none.
        recipe, calibration, environment: as they stand in the file; calibration is empty for data-free methods.
        quality: None when it was not measured; `not_measured` says why.
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
    verification: Verification
    quality: Quality | None
    not_measured: str

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def linears(self) -> list[Linear]:
        return [linear for block in self.blocks for linear in block.linears]


def read_report(path: Path) -> RunReport:
    """The report of a checkpoint folder, or a report file by its own name.

    Raises:
        CheckpointError: there is none, it is damaged, or another version of this toolkit wrote it.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    fields = Fields.load(file)
    version = fields.values.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version!r}; this version reads {FORMAT_VERSION}",
            "Use the release of this toolkit that wrote it",
        )
    plan, recipe, quality = fields.child("plan"), fields.child("recipe"), fields.child("quality")
    return RunReport(
        path=file,
        name=recipe.text("name", "") or file.resolve().parent.name,
        source=fields.text("source"),
        tool=fields.text("tool"),
        seed=fields.count("seed"),
        seconds=fields.number("seconds"),
        recipe=dict(recipe.values),
        calibration=dict(fields.child("calibration").values) if "calibration" in fields else {},
        environment=dict(fields.child("environment").values),
        kinds=tuple(map(_kind, plan.children("layers"))),
        bytes_before=plan.count("bytes_before"),
        notes=tuple(plan.texts("notes")),
        blocks=tuple(map(_block, fields.children("blocks"))),
        verification=_verification(fields),
        quality=None if "not_measured" in quality else _quality(quality),
        not_measured=quality.text("not_measured", ""),
    )


def _kind(fields: Fields) -> PlannedKind:
    method, pruning, scheme = (fields.text(key, "") for key in ("method", "pruning", "scheme"))
    work = [pruning] if pruning else []
    return PlannedKind(
        tensor=fields.text("tensor").removesuffix(".weight"),
        shape=fields.shape("shape"),
        count=fields.count("count"),
        becomes=" + ".join([*work, f"{method} {scheme}"] if method else work or [scheme]),
        reason=fields.text("reason", ""),
        bytes_before=fields.count("bytes_before"),
        bytes_after=fields.count("bytes_after"),
    )


def _block(fields: Fields) -> Block:
    name = fields.text("block")
    linears = tuple(_linear(each, name) for each in fields.children("linears"))
    smoothed = tuple(_smoothed(each, name) for each in fields.children("smoothing"))
    return Block(name, fields.optional_number("relative_error"), linears, smoothed)


def _linear(fields: Fields, block: str) -> Linear:
    return Linear(
        module=fields.text("module"),
        kind=_inside(fields.text("module"), block),
        method=fields.text("method"),
        pruning=fields.text("pruning", ""),
        relative_error=fields.number("relative_error"),
        zeros=fields.optional_number("zeros") or 0.0,
        recovery=fields.text("recovery", ""),
        input_outlier=fields.optional_number("input_outlier"),
    )


def _smoothed(fields: Fields, block: str) -> Smoothed:
    kind = _inside(fields.text("source"), block)
    return Smoothed(kind, fields.number("ratio"), fields.number("loss_before"), fields.number("loss_after"))


def _inside(module: str, block: str) -> str:
    return without_indices(f".{module.removeprefix(f'{block}.')}").removeprefix(".")


def _quality(fields: Fields) -> Quality:
    return Quality(
        perplexity=fields.number("perplexity"),
        baseline_perplexity=fields.optional_number("baseline_perplexity"),
        tokens=fields.count("tokens"),
        kl_mean=fields.optional_number("kl_mean"),
        kl_p999=fields.optional_number("kl_p999"),
        kl_standard_error=fields.optional_number("kl_standard_error"),
        top1_agreement=fields.optional_number("top1_agreement"),
        protocol=fields.text("protocol"),
        data=fields.text("data"),
        data_sha256=fields.text("data_sha256"),
        backend=fields.text("backend"),
        dtype=fields.text("dtype"),
        warnings=tuple(fields.texts("warnings")),
    )


def _verification(fields: Fields) -> Verification:
    found = fields.child("structure")
    schemes = found.child("quantized")
    return Verification(
        ok=found.values.get("ok") is True,
        format=found.text("format"),
        schemes={module: schemes.text(module) for module in schemes.values},
        bits_per_weight=found.number("bits_per_weight"),
        bits_per_parameter=found.number("bits_per_parameter"),
        num_parameters=found.count("num_parameters"),
        num_packed=found.count("num_quantized"),
        total_bytes=found.count("total_bytes"),
        bit_compared=fields.count("bit_compared"),
        notes=tuple(found.texts("notes")),
        problems=tuple(found.texts("problems")),
    )
