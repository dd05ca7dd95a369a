"""On a trained model, a search beats one form everywhere at the same size, on text that it never saw.

`docs/search.md` has the same at more sizes.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.common.cli import demo_model_path
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.search.run import Files, carry_out, find
from compress.search.space import Goal, SearchRequest, parse_candidates
from compress.search.survey import survey

TEXT = CalibrationOptions("bundled", samples=32, length=512)
TOKENS = 8192


def measured(folder: Path) -> tuple[int, float]:
    """Bytes of the weights, and KL to the dense model."""
    request = EvaluationRequest(folder, demo_model_path(), max_tokens=TOKENS, dtype="float32")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size, run_evaluation(request).result.kl_mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "uniform", "share"),
    [
        ("w3g128,w4g128,w5g128,w6g128", "w4g128", 0.85),
        # One rank everywhere spoils sensitive layers; a search leaves those dense.
        ("asvd0.5,asvd0.7,asvd0.8,asvd0.9,dense", "asvd0.8", 0.5),
    ],
)
def test_a_search_beats_one_form_everywhere(tmp_path: Path, words: str, uniform: str, share: float) -> None:
    offered = {str(candidate): candidate for candidate in parse_candidates(words)}
    recipe = Recipe(offered[uniform].stages("gptq", ("*_proj",)), TEXT)
    request = RunRequest(demo_model_path(), "demo", recipe, tmp_path / uniform, measure=False)
    same = run(prepare(request), quiet=True)
    search = SearchRequest(Goal(size=same.structure.total_bytes), tuple(offered.values()), calibration=TEXT)
    files = Files(tmp_path / "figures.json", tmp_path / "found.yaml", "compress search")
    found = survey(search, replace(request, out=tmp_path / "searched"))
    searched = carry_out(find(found, files, quiet=True), files, quiet=True).run
    size, divergence = measured(same.out)
    found_size, found_divergence = measured(searched.out)
    assert found_size <= size
    assert found_divergence < share * divergence
