"""The model card of a checkpoint, README.md: the header that the hub reads, what was made of which model, how and with
what loss, and the card of the source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, TRANSFORMERS, VLLM
from compress.checkpoint.formats.readers import Reader, described, readers
from compress.checkpoint.locate.hub import HubModel
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.cli import DISTRIBUTION
from compress.common.evaluation import Evaluation, findings_of
from compress.common.files import REPORT_FILE, atomic_file, read_json, size
from compress.reporting.page import times

CARD_FILE = "README.md"
Report = Mapping[str, Any]
"""`compression_report.json` as it stands."""
MARK = "<!-- what follows is the card of the source -->"
_HEADER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_RESULTS = ("model-index", "co2_eq_emissions", "new_version")
"""Fields of a header that speak of the source alone."""
_BODY = """# {title}

{origin}

| | |
|---|---|
{facts}

## Use

In the folder of this model, or with the name of its repository on the hub in place of the dot:

```bash
{commands}
```
"""
_RECIPE = """
## Recipe

```
{command}
```

```yaml
{recipe}
```
"""
_SOURCE = """
## Card of the source

{mark}
{text}
"""


@dataclass(frozen=True, slots=True)
class Card:
    """A card in parts: the fields of its header, and the text below."""

    header: dict[str, Any]
    text: str

    @classmethod
    def read(cls, path: Path) -> Card:
        """Reads a card; empty where there is none, without fields where its header is not a YAML mapping."""
        import yaml

        whole = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found = _HEADER.match(whole)
        try:
            header = yaml.safe_load(found[1]) if found else {}
        except yaml.YAMLError:
            header = None
        return cls(header, whole[found.end() :] if found else whole) if isinstance(header, dict) else cls({}, whole)

    @property
    def of_source(self) -> str:
        """The text that was not written here."""
        return self.text.partition(MARK)[2].strip() if MARK in self.text else self.text.strip()

    def __str__(self) -> str:
        return f"---\n{_yaml(self.header)}---\n{self.text}"


def write_card(folder: Path, made_from: Path | None = None) -> None:
    """Writes the card of a checkpoint, in place of that of its source, whose header and text it takes over."""
    packed, before = PackedCheckpoint.open(folder), made_from or folder
    report = read_json(before / REPORT_FILE) if (before / REPORT_FILE).is_file() else None
    with atomic_file(folder / CARD_FILE) as stream:
        stream.write(str(_card(packed, Card.read(folder / CARD_FILE), report, HubModel.of_cached(before))).encode())


def _card(packed: PackedCheckpoint, source: Card, report: Report | None, exported: HubModel | None) -> Card:
    base = _base_model(packed, source, report, exported)
    engines = readers(packed.format, packed.config, packed.schemes.values())
    named = base or (Path(report["source"]).name if report else "another checkpoint")
    recipe = (report["recipe"].get("name") if report else None) or packed.format
    linked = f"[{base}](https://huggingface.co/{base})" if base else named
    text = _BODY.format(
        title=f"{named.rpartition('/')[2]} {recipe}",
        origin=f"{linked}, compressed by {report['tool'] if report else DISTRIBUTION}.",
        facts="\n".join(f"| {name} | {_cell(fact)} |" for name, fact in _facts(packed, report, engines)),
        commands="\n".join(_commands(engines)),
    )
    if report is not None:
        command = report.get("command") or "(a script)"
        text += _RECIPE.format(recipe=_yaml(_given(report["recipe"])).strip(), command=command)
    if source.of_source:
        text += _SOURCE.format(mark=MARK, text=source.of_source)
    return Card(_header(packed, source.header, base, engines), text)


def _base_model(packed: PackedCheckpoint, source: Card, report: Report | None, exported: HubModel | None) -> str | None:
    """Returns the name on the hub of the model that was compressed; None if it is not known."""
    recorded = HubModel.parse(report["source"]) if report else exported
    named = HubModel.parse(str(packed.config.get("_name_or_path")))
    if recorded or MARK not in source.text:
        return recorded.repo if recorded else named.repo if named else None
    given = source.header.get("base_model")
    return given if isinstance(given, str) else None


def _header(
    packed: PackedCheckpoint, given: Mapping[str, Any], base: str | None, engines: list[Reader]
) -> dict[str, Any]:
    """Returns the fields of the header, those of the source `given` among them."""
    header = {name: value for name, value in given.items() if name not in _RESULTS}
    if base is not None:
        header |= {"base_model": base, "base_model_relation": "quantized"}
    tags = header["tags"] if isinstance(header.get("tags"), list) else []
    tags = [tag for tag in tags if tag not in CONTAINERS]
    return header | {
        "library_name": TRANSFORMERS if Reader(TRANSFORMERS, True) in engines else DISTRIBUTION,
        "pipeline_tag": header.get("pipeline_tag") or "text-generation",
        "tags": list(dict.fromkeys([*tags, *([packed.format] if packed.schemes else []), DISTRIBUTION])),
    }


def _facts(packed: PackedCheckpoint, report: Report | None, engines: list[Reader]) -> Iterator[tuple[str, str]]:
    after = packed.files.file_bytes
    yield "stored as", packed.describe()
    if report is None:
        yield "size", size(after)
    else:
        before = report["plan"]["bytes_before"]
        yield "size", f"{size(before)} -> {size(after)} ({times(before, after)})"
    yield "bits per weight", _bits(packed)
    if report is not None:
        yield from _quality(report)
        yield from findings_of(report)
        yield "calibration", _calibration(report)
    named = [replace(each, engine=DISTRIBUTION) if each.engine == RUNTIME else each for each in engines]
    yield from described(named).items()


def _bits(packed: PackedCheckpoint) -> str:
    count = sum(math.prod(packed.shape(module)) for module in packed.modules)
    others = sum(math.prod(packed.files.shape(name)) for name in packed.dense_names())
    whole = f"{8 * packed.files.file_bytes / (count + others):.3f} over the whole model"
    stored = sum(packed.weight_bytes(module) for module in packed.modules)
    return f"{8 * stored / count:.3f} in the quantized layers, {whole}" if count else whole


def _quality(report: Report) -> Iterator[tuple[str, str]]:
    found = report["quality"]
    if "perplexity" not in found:
        yield "quality", f"not measured: {found['not_measured']}"
        return
    baseline = found.get("baseline_perplexity")
    yield "perplexity", f"{'' if baseline is None else f'{baseline:.3f} -> '}{found['perplexity']:.3f}"
    yield from Evaluation.from_dict(found).comparison()
    yield "measured on", f"{found['tokens']:,} tokens: {found['protocol']}; text sha256 {found['data_sha256'][:12]}"


def _calibration(report: Report) -> str:
    given = report.get("calibration")
    if not given:
        return f"none; seed {report['seed']}"
    return f"{given['source']}: {given['sequences']} sequences of {given['length']} tokens; seed {report['seed']}"


def _commands(engines: list[Reader]) -> Iterator[str]:
    yield "runtime serve ."
    if Reader(VLLM, True) in engines:
        yield "vllm serve ."
    yield "compress eval --ppl ."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _given(values: Any) -> Any:
    """Returns values without those that say nothing: None, False and empty ones."""
    if isinstance(values, dict):
        kept = {name: _given(value) for name, value in values.items()}
        return {name: value for name, value in kept.items() if value not in (None, "", [], {}) and value is not False}
    return [_given(each) for each in values] if isinstance(values, list) else values


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
