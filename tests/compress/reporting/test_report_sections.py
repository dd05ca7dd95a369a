"""Sections of a report that only some runs have: shares of blocks, searches, keys and values."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.reporting.comparison import compare, table_rows
from compress.reporting.report_data import SearchRecord, read_headers, read_report
from compress.reporting.report_page import report_page
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage


def test_shares_of_blocks_are_read_and_drawn(tiny_model, tmp_path) -> None:
    stage = PruneStage("wanda", sparsity=0.6, layerwise="owl", owl_m=2.0)
    recipe = Recipe((stage,), CalibrationOptions(samples=4, length=32))
    result = run(prepare(RunRequest(tiny_model(), str(tiny_model()), recipe, tmp_path / "out", measure=False)), True)
    report = read_report(tmp_path / "out")
    assert [share.model_dump() for share in report.layerwise] == result.report["layerwise"]
    page = report_page(report, read_headers(report)).html()
    assert "Pruned share of blocks" in page
    for each in report.layerwise:
        assert f"{each.block}: {100 * each.share:.1f} % pruned" in page


def section(**changes) -> dict:
    return {
        "target": "KL at most 0.05",
        "measured_tokens": 4096,
        "predicted": 0.03,
        "units": [
            {"modules": ["b.0.q", "b.0.k"], "chosen": "w4g128", "sensitivity": {"w3g64": 0.05, "w4g128": 0.02}},
            {"modules": ["b.1.o"], "chosen": "w3g64", "sensitivity": {"w3g64": 0.01, "w4g128": 0.004, "w8": 0.0}},
        ],
        "tries": [{"predicted": 0.03, "measured": 0.04, "bytes": 1000}],
    } | changes


def test_sums_and_the_typical_scheme() -> None:
    found = SearchRecord.model_validate(section())
    assert found.uniform == pytest.approx({"w3g64": 0.06, "w4g128": 0.024})
    assert found.typical in ("w3g64", "w4g128")
    assert found.units[0].modules == ("b.0.q", "b.0.k")
    assert found.tries[0].bytes == 1000


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"units": []}, ("units",)),
        ({"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {}}]}, ("units", 0, "sensitivity")),
        (
            {"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {"w4": "x"}}]},
            ("units", 0, "sensitivity", "w4"),
        ),
        ({"predicted": None}, ("predicted",)),
        ({"tries": [{}]}, ("tries", 0, "predicted")),
    ],
)
def test_damage_is_named(changes: dict, place: tuple) -> None:
    with pytest.raises(ValidationError) as refused:
        SearchRecord.model_validate(section(**changes))
    assert refused.value.errors()[0]["loc"] == place


REPORT = "compression_report.json"


@pytest.fixture(scope="module")
def folder(shared_store) -> Path:
    """The demo model with a default for its cache, nothing else done to it; quality measured."""
    recipe = Recipe((KVCacheStage("auto", max_kl=0.5, tokens=128, max_seq_length=128),))
    return shared_store.folder(
        "out", recipe, lambda out: run(prepare(RunRequest(demo_model_path(), "demo", recipe, out)), quiet=True)
    )


def test_every_measured_form_is_in_the_table(folder) -> None:
    report = read_report(folder)
    page = report_page(report, read_headers(report)).html()
    assert report.kv_cache is not None
    assert report.kv_cache.measured is not None
    assert str(report.kv_cache.default) == "int4 rotated"
    assert report.kv_cache.token_bytes == 864
    for each in report.kv_cache.measured.candidates:
        assert f"<td>{each.scheme}</td>" in page
        assert f"{2**30 // each.token_bytes:,}" in page
        assert f"{each.kl_mean:.4f}" in page
    assert page.count("<td>the default</td>") == 1
    assert "15.41 MB" in page


def test_stored_names_of_a_form_are_read(folder, tmp_path) -> None:
    values = json.loads((folder / REPORT).read_text())
    found = values["kv_cache"]
    for form in (found["default"], *(each["scheme"] for each in found["measured"]["candidates"])):
        form["recent"] = 64 * (form["format"] == "int4")
    (tmp_path / REPORT).write_text(json.dumps(values))
    report = read_report(tmp_path)
    assert report.kv_cache.default.residual_length == 64
    assert report.kv_cache.token_bytes == 864


def test_a_comparison_names_the_cache(folder, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    values = json.loads((folder / REPORT).read_text()) | {"kv_cache": None}
    (other / REPORT).write_text(json.dumps(values))
    rows = table_rows(compare([read_report(folder), read_report(other)]))
    assert {row[0]: row[-2] for row in rows} == {"out": "int4 rotated", "other": "16bit"}


@pytest.mark.parametrize(
    ("change", "where"),
    [({"default": {"format": "int3"}}, "kv_cache"), ({"measured": {"max_kl": "much"}}, "kv_cache.measured.max_kl: ")],
)
def test_damage_is_named_with_its_place(folder, tmp_path, change, where) -> None:
    values = json.loads((folder / REPORT).read_text())
    values["kv_cache"] |= change
    (tmp_path / REPORT).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=where):
        read_report(tmp_path)
