"""From `compression_report.json` to `RunReport`: every field is checked on the way."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.config import REPORT_FILE
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.scheme import Sparsity
from compress.layerwise import BlockShare
from compress.reporting.fields import Fields
from compress.reporting.read_kv_cache import kv_cache_facts
from compress.reporting.run_report import (
    Block,
    Linear,
    PlannedKind,
    Quality,
    RunReport,
    Smoothed,
    Verification,
)
from compress.reporting.search_record import read_search
from compress.targets import without_indices

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
