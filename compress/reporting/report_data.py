"""From `compression_report.json` to `RunReport`: every field is checked on the way."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compress.checkpoint.kv_cache import KVCacheRecord, KVCacheScheme, MeasuredKVCache
from compress.checkpoint.scheme import Sparsity
from compress.common.errors import CheckpointError, SchemeError
from compress.common.files import REPORT_FILE
from compress.methods.owl import BlockShare
from compress.targets import without_indices

# No figure of a run is larger; what is smaller than its inverse counts as 0. Ratios of both stay finite.
_LARGEST = 1e30
_WHOLE = "whole numbers of at least 0"


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a file.

    Attributes:
        path: the file.
        where: the object's place in it: `blocks[2].linears[0]`; empty for the whole.
        values: the object.
    """

    path: Path
    where: str
    values: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Fields:
        """Reads a file. Raises CheckpointError when it is missing, not text, not JSON, or no object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist", "Name a checkpoint folder that this toolkit wrote, with its report"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}", "Copy this file again") from error
        return cls(path, "", values) if isinstance(values, dict) else _refuse(path, "", "is not an object")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """A string; a missing one is an error unless there is a default."""
        value = self._take(key, default)
        return value if isinstance(value, str) else self.refuse(key, "is not text")

    def number(self, key: str) -> float:
        """A finite number, of at most 1e30."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            self.refuse(key, "is not a finite number")
        return float(value) if abs(value) >= 1 / _LARGEST else 0.0

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def count(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self.number(key)
        return int(value) if value >= 0 and math.floor(value) == value else self.refuse(key, f"is none of {_WHOLE}")

    def child(self, key: str) -> Fields:
        value = self._take(key)
        return Fields(self.path, self._place(key), value) if isinstance(value, dict) else self._no_object(key)

    def children(self, key: str) -> list[Fields]:
        """A list of objects; a missing one is an error."""
        found = self._list(key)
        places = [f"{self._place(key)}[{index}]" for index in range(len(found))]
        return [
            Fields(self.path, place, value) if isinstance(value, dict) else _refuse(self.path, place, "is no object")
            for place, value in zip(places, found, strict=True)
        ]

    def texts(self, key: str) -> list[str]:
        """A list of strings; a missing one is empty."""
        found = self._list(key) if key in self else []
        return found if all(isinstance(each, str) for each in found) else self.refuse(key, "is no list of text")

    def shape(self, key: str) -> tuple[int, ...]:
        """A list of sizes."""
        found = self._list(key)
        if not all(type(size) is int and size >= 0 for size in found):
            self.refuse(key, f"is no list of {_WHOLE}")
        return tuple(found)

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raises CheckpointError that names the place."""
        _refuse(self.path, self._place(key), problem)

    def _take(self, key: str, default: str | None = None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        return default if default is not None else self.refuse(key, "is missing")

    def _list(self, key: str) -> list[Any]:
        value = self._take(key)
        return value if isinstance(value, list) else self.refuse(key, "is not a list")

    def _no_object(self, key: str) -> NoReturn:
        self.refuse(key, "is not an object")

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _refuse(path: Path, where: str, problem: str) -> NoReturn:
    what = f"{where} {problem}" if where else f"it {problem}"
    raise CheckpointError(f"{path} is not a report that can be read: {what}", "Copy this file again, or repeat the run")


@dataclass(frozen=True, slots=True)
class SearchedUnit:
    """Layers that share one choice.

    Attributes:
        chosen: what they become: `w4g128`, `asvd0.8`.
        sensitivity: KL of the whole model, in nats, when only these layers are changed, by what they become.
    """

    modules: tuple[str, ...]
    chosen: str
    sensitivity: dict[str, float]


@dataclass(frozen=True, slots=True)
class SearchTry:
    """A checkpoint that was made on the way to a target of quality."""

    predicted: float
    measured: float
    bytes: int


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """A search.

    Attributes:
        target: what it aimed at, in words.
        measured_tokens: how much text sensitivities were measured on.
        predicted: sum of the sensitivities of what was chosen.
    """

    target: str
    measured_tokens: int
    predicted: float
    units: tuple[SearchedUnit, ...]
    tries: tuple[SearchTry, ...]

    @property
    def typical(self) -> str:
        """The scheme that most units could get and most did."""
        offered = Counter(scheme for unit in self.units for scheme in unit.sensitivity)
        chosen = Counter(unit.chosen for unit in self.units)
        return max(offered, key=lambda scheme: (offered[scheme], chosen[scheme], scheme))

    @property
    def uniform(self) -> dict[str, float]:
        """Sum of sensitivities by scheme, for the schemes that every unit could get, in the order of their loss."""
        shared = [scheme for scheme in self.units[0].sensitivity if all(scheme in u.sensitivity for u in self.units)]
        sums = {scheme: sum(unit.sensitivity[scheme] for unit in self.units) for scheme in shared}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read_search(fields: Fields) -> SearchRecord:
    """Reads the section. Raises CheckpointError where it is damaged."""
    units = tuple(map(_unit, fields.children("units")))
    if not units:
        fields.refuse("units", "is empty")
    return SearchRecord(
        target=fields.text("target"),
        measured_tokens=fields.count("measured_tokens"),
        predicted=fields.number("predicted"),
        units=units,
        tries=tuple(
            SearchTry(each.number("predicted"), each.number("measured"), each.count("bytes"))
            for each in fields.children("tries")
        ),
    )


def _unit(fields: Fields) -> SearchedUnit:
    modules, measured = tuple(fields.texts("modules")), fields.child("sensitivity")
    sensitivity = {scheme: measured.number(scheme) for scheme in measured.values}
    if not modules or not sensitivity:
        fields.refuse("modules" if not modules else "sensitivity", "is empty")
    return SearchedUnit(modules, fields.text("chosen"), sensitivity)


@dataclass(frozen=True, slots=True)
class Linear:
    """What happened to one linear.

    Attributes:
        kind: its name inside its block, indices (experts) as `*`.
        relative_error: squared error of the weight over its square, each column weighted by its input.
        zeros: share of its weights that are zero by pruning.
        recovery: what was done instead where the method could not be applied; empty otherwise.
        input_outlier: as in `compress.pipeline.block.LinearRecord`; None where it was not recorded.
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


def kv_cache_facts(fields: Fields) -> KVCacheFacts:
    """Raises CheckpointError that names the place."""
    record = _record(fields.child("measured")) if "measured" in fields else None
    return KVCacheFacts(_scheme(fields, "default"), fields.text("warning", ""), record)


def _record(fields: Fields) -> KVCacheRecord:
    return KVCacheRecord(
        max_kl=fields.number("max_kl"),
        tokens=fields.count("tokens"),
        length=fields.count("length"),
        data=fields.text("data"),
        data_sha256=fields.text("data_sha256"),
        protocol=fields.text("protocol"),
        perplexity=fields.number("perplexity"),
        token_bytes=fields.count("token_bytes"),
        candidates=tuple(map(_candidate, fields.children("candidates"))),
    )


def _candidate(fields: Fields) -> MeasuredKVCache:
    return MeasuredKVCache(
        scheme=_scheme(fields, "scheme"),
        token_bytes=fields.count("token_bytes"),
        kl_mean=fields.number("kl_mean"),
        kl_p999=fields.number("kl_p999"),
        perplexity=fields.number("perplexity"),
        top1_agreement=fields.number("top1_agreement"),
        kl_standard_error=fields.optional_number("kl_standard_error"),
    )


def _scheme(fields: Fields, key: str) -> KVCacheScheme:
    try:
        return KVCacheScheme.from_dict(fields.child(key).values)
    except (SchemeError, TypeError) as error:
        fields.refuse(key, f"cannot be read ({error})")


FORMAT_VERSION = 1


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
        shares=tuple(map(_share, fields.children("layerwise"))) if "layerwise" in fields else (),
        verification=_verification(fields),
        quality=None if "not_measured" in quality else _quality(quality),
        not_measured=quality.text("not_measured", ""),
        kv_cache=kv_cache_facts(fields.child("kv_cache")) if "kv_cache" in fields else None,
        search=read_search(fields.child("search")) if "search" in fields else None,
    )


def _kind(fields: Fields) -> PlannedKind:
    method, pruning, factoring, scheme = (fields.text(key, "") for key in ("method", "pruning", "factoring", "scheme"))
    work = [each for each in (pruning, factoring) if each]
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


def _share(fields: Fields) -> BlockShare:
    pattern = Sparsity.parse(fields.text("pattern")) if "pattern" in fields else None
    return BlockShare(fields.text("block"), fields.number("outlier_ratio"), fields.number("share"), pattern)


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
