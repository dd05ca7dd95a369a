"""Searches on a mixture: all experts of a block become one candidate, as engines multiply them at once."""

from pathlib import Path

import pytest

from compress.checkpoint.reader import PackedCheckpoint
from compress.pipeline.prepare import RunRequest
from compress.recipe import CalibrationOptions
from compress.search.run import Files, carry_out, find
from compress.search.space import Goal, SearchRequest, parse_candidates
from compress.search.survey import survey

TEXT = CalibrationOptions("bundled", samples=3, length=48)
EXPERTS = 8


@pytest.mark.full
def test_experts_of_a_block_share_one_choice(tiny_model, tmp_path: Path) -> None:
    source, out = tiny_model("mixtral", num_hidden_layers=1), tmp_path / "out"
    goal = Goal(bits_per_weight=3.0)
    request = SearchRequest(goal, candidates=parse_candidates("w2g32,w4g32"), measured=1, calibration=TEXT)
    found = survey(request, RunRequest(source, str(source), request.probe(), out, dtype="float32", measure=False))
    sizes = {len(group.modules) for group in found.candidates if ".experts." in group.name}
    assert sizes == {3 * EXPERTS}
    files = Files(out.with_name("figures.json"), out.with_name("found.yaml"), "compress search")
    result = carry_out(find(found, files, quiet=True), files, quiet=True).run
    assert result.structure.ok
    assert result.structure.bits_per_weight <= 3.0
    schemes = PackedCheckpoint.open(out).schemes
    assert len({scheme for name, scheme in schemes.items() if ".experts." in name}) == 1
