"""The pages as a browser shows them: they fit a phone, follow the theme, and load nothing from elsewhere."""

from pathlib import Path

import pytest
from browser import browser

from compress.checkpoint.weights import Int
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.reporting.comparison import compare, compare_page
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page
from compress.stages.quantize import QuantizeStage

WIDTHS = (360, 1280)


@pytest.fixture(scope="module")
def pages(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A report and a comparison of two runs, as files."""
    folder = tmp_path_factory.mktemp("pages")
    reports = []
    for method in ("rtn", "awq"):
        recipe = Recipe((QuantizeStage(method, Int(4, 64)),), CalibrationOptions(samples=4, length=32))
        name = f"{method}-{'a-long-name-' * 6}"
        run(prepare(RunRequest(tiny_model(), str(tiny_model()), recipe, folder / name)), quiet=True)
        reports.append(read_report(folder / name))
    (folder / "report.html").write_text(report_page(reports[1], read_headers(reports[1])).html())
    (folder / "compare.html").write_text(compare_page(compare(reports)).html())
    return [folder / "report.html", folder / "compare.html"]


@pytest.mark.full
def test_pages_fit_follow_the_theme_and_ask_nobody(pages: list[Path]) -> None:
    asked: list[str] = []
    grounds: dict[str, set[str]] = {"light": set(), "dark": set()}
    with browser() as chromium:
        for scheme, seen in grounds.items():
            for width in WIDTHS:
                view = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                view.on("request", lambda request: asked.append(request.url))
                for path in pages:
                    view.goto(path.as_uri())
                    assert view.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
                    assert view.evaluate("document.querySelector('svg').getBoundingClientRect().height") > 60
                    seen.add(view.evaluate("getComputedStyle(document.body).backgroundColor"))
                view.close()
    assert set(asked) == {path.as_uri() for path in pages}
    assert all(len(seen) == 1 for seen in grounds.values())
    assert grounds["light"] != grounds["dark"]
