"""`compress compare`: who is dominated, what may be compared at all, and what is printed."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compress.checkpoint.weights import Int
from compress.cli import main
from compress.common.errors import ToolkitError
from compress.recipe import Recipe
from compress.reporting.comparison import compare, compare_page, judged_by
from compress.reporting.report_data import RunReport, read_report
from compress.stages.quantize import QuantizeStage


@pytest.fixture(scope="module")
def folders(packed_run) -> list[Path]:
    """Measured runs of one tiny model in 3 and 8 bits."""
    return [packed_run(Recipe((QuantizeStage("rtn", Int(bits, 64)),)), f"w{bits}", measure=True) for bits in (8, 3)]


@pytest.fixture
def reports(folders: list[Path]) -> list[RunReport]:
    return [read_report(folder) for folder in folders]


def changed(record, **values):
    return record.model_copy(update=values)


def made_of(report: RunReport, name: str, size: int, kl: float | None, perplexity: float = 9.0) -> RunReport:
    """The same run under another name with other figures."""
    structure = changed(report.structure, total_bytes=size)
    quality = changed(report.quality, kl_mean=kl, perplexity=perplexity)
    return changed(report, path=Path(name) / "report.json", structure=structure, quality=quality)


def test_real_runs_stand_in_order_of_size_and_both_on_the_frontier(reports) -> None:
    found = compare(reports)
    assert [each.label for each in found.candidates] == ["w3", "w8"]
    assert found.candidates[0].kl > found.candidates[1].kl
    assert not any(each.dominated_by for each in found.candidates)
    assert found.baseline_perplexity == reports[0].quality.baseline_perplexity


def test_dominated_ones_are_marked(reports) -> None:
    figures = {"small": (10, 0.5), "twin": (10, 0.5), "worse": (10, 0.6), "large": (20, 0.1), "lost": (30, 0.55)}
    made = [made_of(reports[0], name, *each) for name, each in figures.items()]
    marked = {each.label: set(each.dominated_by) for each in compare(made).candidates}
    assert marked == {
        "small": set(),
        "twin": set(),
        "worse": {"small", "twin"},
        "large": set(),
        "lost": {"small", "twin", "large"},
    }


def test_another_measure_judges_anew(reports) -> None:
    made = [made_of(reports[0], "a", 10, 0.1, 9.0), made_of(reports[0], "b", 20, 0.2, 8.0)]
    found = compare(made)
    assert {each.label: each.dominated_by for each in found.candidates} == {"a": (), "b": ("a",)}
    assert not any(each.dominated_by for each in judged_by(found, "ppl").candidates)


def test_what_cannot_be_compared_is_refused(reports) -> None:
    one, other = reports

    def measured(**changes) -> RunReport:
        return changed(other, quality=changed(other.quality, **changes))

    refused = {
        "^1 ": [one],
        "twice": [one, one],
        " elsewhere": [one, changed(other, source="elsewhere")],
        r" 7\. ": [one, changed(other, plan=changed(other.plan, bytes_before=7))],
        "0{64}": [one, measured(data_sha256="0" * 64)],
        r"windows of 7\. ": [one, measured(protocol="windows of 7")],
        r" 8\. ": [one, measured(tokens=8)],
        r" transformers\. ": [one, measured(backend="transformers")],
        r" 3\.": [one, measured(baseline_perplexity=3.0)],
        r" KL.*no room": [one, changed(other, quality=None, not_measured="no room")],
        "--measure ppl": [one, measured(kl_mean=None)],
    }
    for said, pair in refused.items():
        with pytest.raises(ToolkitError, match=said):
            compare(pair)
    for axes, wrong in ((("weight", "kl"), "'weight'"), (("size", "taste"), "'taste'")):
        with pytest.raises(ToolkitError, match=f"^--.* {wrong}"):
            compare(reports, *axes)
    assert compare([made_of(one, "a", 1, None), made_of(one, "b", 2, None)], loss="ppl").loss_name == "ppl"


def test_the_page_names_every_checkpoint_and_escapes_it(reports) -> None:
    class Tags(HTMLParser):
        found: tuple[str, ...] = ()

        def handle_starttag(self, tag, attrs) -> None:
            self.found += (tag,)

    made = [made_of(reports[0], name, size, kl) for name, size, kl in (("<b>x", 1, 0.3), ("plain", 2, 0.2))]
    html = compare_page(compare(made)).html()
    tags = Tags()
    tags.feed(html)
    assert "<b>x" not in html
    assert html.count("&lt;b&gt;x") >= 3
    assert tags.found.count("title") == 1 + 4
    assert tags.found.count("svg") == 2
    assert "://" not in html


def test_the_command_prints_a_table_or_json_and_writes_the_page(folders, tmp_path, monkeypatch, capsys) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compress", "compare", *map(str, folders), *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    status, out, _ = command("--out", str(tmp_path / "compare.html"))
    assert status == 0
    assert "frontier" in out
    assert "Protocol: " in out
    assert "w8" in (tmp_path / "compare.html").read_text()
    status, out, _ = command("--json", "--by", "bits", "--measure", "ppl")
    found = json.loads(out)
    assert (found["cost_name"], found["loss_name"]) == ("bits", "ppl")
    assert {each["label"] for each in found["candidates"]} == {"w3", "w8"}
    status, _, error = command("--by", "colour")
    assert status == 1
    assert error.startswith("error: --by 'colour' is unknown")
