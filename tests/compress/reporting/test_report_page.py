"""`compress report`: real runs become pages whose figures are those of the report, and nothing in them can act."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compress.checkpoint.weights import Int
from compress.cli import main
from compress.common.errors import CheckpointError, ToolkitError
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.reporting.page import Page
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

HOSTILE = "<script>alert('x')</script>\"&\u202e"
REPORT = "compression_report.json"


class ParsedPage(HTMLParser):
    """A page as a browser parses it: text, tags, attributes; unclosed tags are an error."""

    VOID = ("meta", "line", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if "style" not in self.open:
            self.words.append(data)


def page_of(folder: Path) -> ParsedPage:
    report = read_report(folder)
    return ParsedPage(report_page(report, read_headers(report)).html())


@pytest.fixture(scope="module")
def runs(packed_run) -> dict[str, Path]:
    """Finished runs on a tiny model: AWQ with quality measured, and RTN without."""
    calibration = CalibrationOptions(samples=6, length=48)
    return {
        method: packed_run(Recipe((QuantizeStage(method, Int(4, 64)),), calibration), method, measure=method == "awq")
        for method in ("awq", "rtn")
    }


@pytest.fixture
def damaged(runs, tmp_path: Path):
    """A copy of a run whose report is changed by a function."""

    def damage(change, method: str = "awq") -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(runs[method], folder)
        report = json.loads((folder / REPORT).read_text())
        change(report)
        (folder / REPORT).write_text(json.dumps(report))
        return folder

    return damage


def test_the_figures_are_those_of_the_report(runs) -> None:
    report = json.loads((runs["awq"] / REPORT).read_text())
    shown = page_of(runs["awq"]).text
    structure, quality = report["structure"], report["quality"]
    assert f"{structure['bits_per_weight']:.3f} bits" in shown
    assert f"{structure['total_bytes'] / 1e6:.2f} MB" in shown
    assert f"{quality['perplexity']:.3f}" in shown
    assert f"{quality['baseline_perplexity']:.3f}" in shown
    assert f"{quality['kl_mean']:.4f}" in shown
    assert quality["protocol"] in shown
    assert "sound" in shown
    assert "kept dense" in shown
    assert f"{structure['num_parameters']:,}" in shown


def test_every_linear_and_block_has_its_mark(runs) -> None:
    report = read_report(runs["awq"])
    page = page_of(runs["awq"])
    edges = sum(len(block.smoothing) for block in report.blocks)
    outliers = sum(linear.input_outlier is not None for linear in report.linears)
    marks = 2 * len(report.linears) + len(report.blocks) + 2 * edges + outliers
    bars = 2 + 4 + 2 + 2
    assert page.tags.count("title") == 1 + bars + marks
    assert edges
    first = report.blocks[0].linears[0]
    kind = report.blocks[0].kind(first.module)
    assert f"{kind}, block 0: {first.relative_error:.3g}" in page.text
    assert f"{kind}, block 0: {4 + 16 / 64:.3f} bits" in page.text


def test_memory_of_keys_and_values_is_computed_from_the_config(runs) -> None:
    report = read_report(runs["awq"])
    memory = read_headers(report).key_values
    config = json.loads((runs["awq"] / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    assert memory.token_bytes == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size * 2
    assert f"{2**30 // memory.token_bytes:,}" in page_of(runs["awq"]).text


def test_missing_sections_are_said(runs) -> None:
    shown = page_of(runs["rtn"]).text
    assert "Perplexity and KL were not measured: not requested" in shown
    assert "Nothing was smoothed" in shown
    assert "Block outputs were not computed" in shown
    assert "outliers were not recorded" in shown
    assert "none: the method needs no data" in shown


def test_unstructured_pruning_packs_nothing_and_says_so(tiny_model, tmp_path: Path) -> None:
    recipe = Recipe((PruneStage("magnitude", None, 0.5),))
    run(prepare(RunRequest(tiny_model(), str(tiny_model()), recipe, tmp_path / "out", measure=False)), quiet=True)
    shown = page_of(tmp_path / "out").text
    linears = len(read_report(tmp_path / "out").linears)
    assert f"Pruning made 50.0 % of the weights of {linears} layers zero" in shown
    assert "q_proj, block 0: 16.000 bits" in shown
    assert "packed layers none" in shown


def test_a_report_without_its_checkpoint_still_has_a_page(runs, tmp_path: Path) -> None:
    shutil.copy(runs["awq"] / REPORT, tmp_path / "alone.json")
    shown = page_of(tmp_path / "alone.json").text
    assert "memory per token is not known" in shown
    assert "bits of each layer are not known" in shown


def test_hostile_names_are_text(damaged) -> None:
    def poison(report) -> None:
        report["source"] = report["tool"] = report["recipe"]["name"] = HOSTILE
        report["plan"]["notes"] = [HOSTILE]
        report["plan"]["layers"][0] |= {"tensor": HOSTILE, "reason": HOSTILE}
        report["environment"][HOSTILE] = [HOSTILE]
        report["quality"]["protocol"] = report["quality"]["data"] = HOSTILE
        report["calibration"]["warnings"] = [HOSTILE]
        block = report["blocks"][0]
        block["block"] = HOSTILE
        block["linears"][0] |= {"module": f"{HOSTILE}.x", "recovery": HOSTILE}
        block["smoothing"][0]["source"] = HOSTILE

    page = page_of(damaged(poison))
    assert "script" not in page.tags
    assert page.text.count("alert('x')") >= 12
    assert "\u202e" not in page.text
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_a_page_loads_nothing(runs) -> None:
    for folder in runs.values():
        report = read_report(folder)
        html = report_page(report, read_headers(report)).html()
        page = ParsedPage(html)
        assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
        assert not {"src", "xlink:href", "srcset", "action"} & {name for name, _ in page.attributes}
        inside = [value for name, value in page.attributes if name == "href"] + re.findall(r"url\(([^)]*)\)", html)
        assert inside
        assert all(re.fullmatch(r"#[a-z0-9]+", value) for value in inside)
        assert "@import" not in html
        assert "://" not in html


def test_equal_reports_give_equal_pages(runs) -> None:
    report = read_report(runs["awq"])
    first, second = (report_page(report, read_headers(report)).html() for _ in range(2))
    assert first == second


def test_without_matplotlib_the_page_shows_tables(runs, monkeypatch) -> None:
    monkeypatch.setattr("compress.reporting.page.has_matplotlib", lambda: False)
    report, page = read_report(runs["awq"]), page_of(runs["awq"])
    assert "pip install" in page.text
    assert "svg" not in page.tags
    assert page.tags.count("table") > page.tags.count("figure") > 8
    assert f"{report.quality.perplexity:.3f}" in page.text
    for linear in report.linears:
        assert f"{linear.relative_error:.3g}" in page.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: report.update(format_version=2), r"format_version 2.* 1"),
        (lambda report: report.pop("plan"), "plan: "),
        (lambda report: report.update(blocks="none"), "blocks: "),
        (lambda report: report["blocks"].append(3), r"blocks\[3\]: "),
        (
            lambda report: report["blocks"][1]["linears"][0].update(relative_error="x"),
            r"blocks\[1\]\.linears\[0\]\.rel",
        ),
        (lambda report: report["blocks"][1]["linears"][0].update(relative_error=float("nan")), "relative_error: "),
        (lambda report: report["blocks"][1]["linears"][0].update(relative_error=1e300), "relative_error: "),
        (lambda report: report["structure"].update(total_bytes=-1), "structure.total_bytes"),
        (lambda report: report["structure"].update(quantized=[1]), "structure.quantized: "),
        (lambda report: report["plan"]["layers"][0].update(shape=["a"]), r"layers\[0\].shape\[0\]"),
        (lambda report: report["quality"].update(tokens=True), "quality.tokens"),
    ],
)
def test_damaged_reports_are_refused_by_place(damaged, change, said) -> None:
    with pytest.raises(ToolkitError, match=said):
        read_report(damaged(change))


def test_extreme_figures_are_drawn(damaged) -> None:
    def stretch(report) -> None:
        first, second = (block["linears"][0] for block in report["blocks"][:2])
        first["relative_error"], second["relative_error"] = 1e30, 1e-30
        report["blocks"][0]["smoothing"][0] |= {"loss_before": 5e-324, "loss_after": 1e30}
        report["blocks"][1]["relative_error"] = None
        report["plan"]["bytes_before"] = 0

    assert page_of(damaged(stretch)).tags.count("svg") >= 8


def test_no_report_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{REPORT} .*exist"):
        read_report(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[]", b"[" * 100_000):
        (tmp_path / REPORT).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{REPORT} .*(JSON|object)"):
            read_report(tmp_path)


def test_the_command_writes_the_page_and_spares_other_files(runs, tmp_path: Path, monkeypatch, capsys) -> None:
    def report(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compress", "report", str(runs["rtn"]), *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, "".join(capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert report() == (0, "Wrote report.html\n")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    (tmp_path / "letter.txt").write_text("mine")
    status, said = report("--out", "letter.txt")
    assert status == 1
    assert re.search(r"letter\.txt .*--out", said)
    assert (tmp_path / "letter.txt").read_text() == "mine"
    with pytest.raises(ToolkitError, match=rf"^{tmp_path} .*--out {tmp_path}/report\.html"):
        Page("", "", "", []).write(tmp_path)
    with pytest.raises(ToolkitError, match=f"{tmp_path}/nowhere .*--out"):
        Page("", "", "", []).write(tmp_path / "nowhere" / "page.html")
