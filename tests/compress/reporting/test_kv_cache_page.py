"""Keys and values on the page of a run and in a comparison."""

import json
from pathlib import Path

import pytest

from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.methods.kv_cache import KVCacheStage
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import Recipe
from compress.reporting.comparison import compare, table_rows
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page

REPORT = "compression_report.json"


@pytest.fixture(scope="module")
def folder(shared_store) -> Path:
    """The demo model with a default for its cache, nothing else done to it; quality measured."""
    recipe = Recipe((KVCacheStage("auto", max_kl=0.5, tokens=128, length=128),))
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
    [
        ({"default": {"format": "int3"}}, "kv_cache"),
        ({"measured": {"max_kl": "much"}}, "kv_cache.measured.max_kl: "),
    ],
)
def test_damage_is_named_with_its_place(folder, tmp_path, change, where) -> None:
    values = json.loads((folder / REPORT).read_text())
    values["kv_cache"] |= change
    (tmp_path / REPORT).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=where):
        read_report(tmp_path)
