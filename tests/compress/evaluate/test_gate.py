"""Limits of a gate against reports."""

from typing import Any

import pytest

from compress.common.errors import RecipeError
from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, ReportFigure
from compress.evaluate.gate import measured_for, parse_gate, usual_limits, verdicts
from compress.recipe_file import parse_recipe, parse_work

QUALITY = {"kl_mean": 0.04, "kl_p999": 0.5, "flips": 0.1, "acceptance": 0.93, "perplexity": 20.0}


def report(*tokens: int, calibrated: bool = True, **quality: Any) -> dict[str, Any]:
    blocks = [{"experts": [{"tokens": list(tokens)}]} if tokens else {}]
    return {
        "quality": QUALITY | quality,
        "blocks": blocks,
        "calibration": {"source": "bundled"} if calibrated else None,
    }


def kept(gate: str, of: dict[str, Any]) -> dict[str, bool]:
    return {each.name: each.is_kept for each in verdicts(parse_gate(gate), of)}


def test_a_limit_itself_is_kept() -> None:
    gate = "kl=0.04 kl_p999=0.5, flips=0.1 acceptance=0.93,perplexity=20 experts=1 unused_experts=0"
    assert kept(gate, report(4, 9)) == dict.fromkeys(parse_gate(gate), True)
    worse = {"kl_mean": 0.041, "kl_p999": 0.51, "flips": 0.11, "acceptance": 0.92, "perplexity": 20.1}
    assert kept(gate, report(4, 0, **worse)) == dict.fromkeys(parse_gate(gate), False)


def test_what_was_not_measured_is_not_kept() -> None:
    unmeasured = report() | {"quality": {"not_measured": "too large"}}
    assert kept("kl=1 acceptance=0.1", unmeasured) == {"kl": False, "acceptance": False}
    assert kept("experts=0.5", report(calibrated=False)) == {"experts": False}
    assert kept("experts=0.5", report(3, 0, 2)) == {"experts": True}
    assert kept("experts=1", report()) == {"experts": True}


def test_a_figure_that_says_nothing_of_a_model_keeps_every_limit() -> None:
    found = report() | {
        "figures": {
            "routers": Finding.nothing("no layer is a mixture").to_dict(),
            "ends": Finding(0.8, "8 of 10").to_dict(),
        }
    }
    assert kept("routers=0 ends=0.9 loops=1", found) == {"routers": True, "ends": False, "loops": False}
    assert [str(each) for each in verdicts({"routers": 0.0, "ends": 0.9}, found)] == [
        "routers does not apply (no layer is a mixture), at most 0",
        "ends is 0.8 (8 of 10), at least 0.9",
    ]


def test_the_default_is_the_usual_limits_and_others_replace_them() -> None:
    limits = parse_gate("default ends=0.5,kl=0.1")
    assert limits == usual_limits() | {"ends": 0.5, "kl": 0.1}
    assert measured_for(limits) == tuple(usual_limits())
    assert measured_for(parse_gate("kl=1 experts=1")) == ()


@pytest.mark.parametrize("text", ["kll=1", "kl", "kl=little", "kl=1 flip=2"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_gate(text)


STAGES = "stages:\n- quantize: {method: rtn}\n"


def test_recipes_have_a_gate_that_is_no_part_of_what_they_compute() -> None:
    gated = parse_recipe(f"{STAGES}gate: {{kl: 0.05, acceptance: 1}}\n", "a.yaml")
    assert gated.gate == {"kl": 0.05, "acceptance": 1}
    assert gated.to_dict() == parse_recipe(STAGES, "a.yaml").to_dict()
    worded = parse_recipe(f"{STAGES}gate: default kl=0.05\n", "a.yaml")
    assert worded.gate == usual_limits() | {"kl": 0.05}
    for gate in ("{kll: 1}", "{kl: little}", "3", "kl", "usual"):
        with pytest.raises(RecipeError, match=r"a\.yaml:3"):
            parse_recipe(f"{STAGES}gate: {gate}\n", "a.yaml")
    with pytest.raises(RecipeError, match="--gate"):
        parse_work("search: {target_bits: 4}\ngate: {kl: 1}\n", "a.yaml")


def test_a_figure_is_added_by_one_row() -> None:
    FIGURES.register("size")(ReportFigure("bytes", "at most", lambda found: found["structure"]["total_bytes"]))
    try:
        assert kept("size=100", report() | {"structure": {"total_bytes": 101}}) == {"size": False}
    finally:
        FIGURES.remove("size")
