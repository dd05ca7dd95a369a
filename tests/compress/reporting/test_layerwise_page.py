"""The page of a run that pruned its blocks by their outliers shows the shares."""

from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, PruneStage, Recipe
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page


def test_shares_of_blocks_are_read_and_drawn(tiny_model, tmp_path) -> None:
    stage = PruneStage("wanda", sparsity=0.6, layerwise="owl", outlier_factor=2.0)
    recipe = Recipe((stage,), CalibrationOptions(samples=4, length=32))
    result = run(prepare(RunRequest(tiny_model(), str(tiny_model()), recipe, tmp_path / "out", measure=False)), True)
    report = read_report(tmp_path / "out")
    assert [share.model_dump() for share in report.layerwise] == result.report["layerwise"]
    page = report_page(report, read_headers(report)).html()
    assert "Pruned share of blocks" in page
    for each in report.layerwise:
        assert f"{each.block}: {100 * each.share:.1f} % pruned" in page
