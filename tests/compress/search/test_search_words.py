"""What users write: menus, targets, search sections of recipes; and the recipes that a search writes."""

from __future__ import annotations

import pytest

from calibration.parts import Part
from compress.checkpoint.errors import CheckpointError, RecipeError
from compress.checkpoint.scheme import Scheme
from compress.recipe import CalibrationOptions, Recipe
from compress.recipe_file import load_recipe, load_work, parse_recipe, parse_work
from compress.search.goal import Goal, parse_size
from compress.search.menu import DEFAULT_MENU, parse_menu, word
from compress.search.recipe_text import recipe_text, write_recipe
from compress.search.request import SearchRequest
from compress.search.units import Unit
from compress.stages.quantize import QuantizeStage


def test_menu_words() -> None:
    assert parse_menu("w2g64, w3g64asym,w8,w2g64") == (Scheme(2, 64), Scheme(3, 64, False), Scheme(8, None))
    assert ",".join(map(word, parse_menu(DEFAULT_MENU))) == DEFAULT_MENU


@pytest.mark.parametrize(("text", "said"), [("w4", "leaves nothing to choose"), ("w4g128,four", "'four' is no scheme")])
def test_menus_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        parse_menu(text)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("800mb", 8 * 10**8), ("123", 123)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5 parsecs", "-5GB", "GB", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RecipeError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("given", [{}, {"kl": 0.1, "size": 5}, {"kl": 0.0}, {"bits_per_weight": float("inf")}])
def test_a_search_has_one_target_above_zero(given: dict) -> None:
    with pytest.raises(RecipeError, match="target"):
        Goal(**given)


@pytest.mark.parametrize("method", ["awq", "gtpq"])
def test_methods_without_sensitivities_of_single_layers_are_refused(method: str) -> None:
    with pytest.raises(RecipeError, match="gptq"):
        SearchRequest(Goal(kl=0.1), method=method)


def test_a_search_in_a_recipe() -> None:
    text = (
        "seed: 3\ncalibration: {samples: 8, length: 64}\n"
        "search:\n  target_size: 5 MB\n  menu: [w2g64, w4g128]\n  method: rtn\n  measured: 4\n  ignore: [o_proj]\n"
    )
    expected = SearchRequest(
        Goal(size=5_000_000),
        (Scheme(2, 64), Scheme(4, 128)),
        "rtn",
        4,
        ignore=("o_proj",),
        calibration=CalibrationOptions(samples=8, length=64),
        seed=3,
        name="r",
    )
    assert parse_work(text, "r.yaml") == expected
    with pytest.raises(RecipeError, match="searches for its stages"):
        parse_recipe(text, "r.yaml")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{max_kl: 0.05, target_bpw: 3}", "r.yaml:1: a search has one target, and 2 are given"),
        ("{max_lk: 0.05}", "r.yaml:1: unknown key 'max_lk' in search. Did you mean 'max_kl'"),
        ("{max_kl: 1, menu: [w4]}", "r.yaml:1: a menu of 1 leaves nothing to choose"),
        ("{target_size: huge}", "r.yaml:1: 'huge' is no size"),
        ("{max_kl: 1}\nstages: []", "r.yaml:1: a recipe has stages or searches for them"),
    ],
)
def test_mistakes_in_a_search_are_named_with_their_line(body: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_work(f"search: {body}\n", "r.yaml")
    assert said in str(caught.value)


def test_the_bundled_search() -> None:
    search = load_work("smallest-kl")
    assert isinstance(search, SearchRequest)
    assert (search.goal, ",".join(map(word, search.menu))) == (Goal(kl=0.05), DEFAULT_MENU)
    with pytest.raises(RecipeError, match="compress run smallest-kl"):
        load_recipe("smallest-kl")


UNITS = (
    Unit(0, ("b.0.q", "b.0.k"), ((8, 8), (4, 8))),
    Unit(0, ("b.0.o",), ((8, 8),)),
    Unit(1, ("b.1.o",), ((8, 8),)),
)


@pytest.mark.parametrize("source", ["it's mine: #1.txt", (Part("bundled", 0.25), Part("a.txt", 0.75))])
def test_a_written_recipe_reads_as_what_was_meant(source) -> None:
    search = SearchRequest(Goal(kl=0.1), calibration=CalibrationOptions(source, 8, 64), seed=5, name="search-kl0.1")
    narrow, wide = Scheme(3, 64, False), Scheme(8, None)
    recipe = search.recipe(dict(zip(UNITS, (wide, narrow, narrow), strict=True)))
    assert recipe.stages == (
        QuantizeStage("gptq", narrow, ("b.0.o", "b.1.o")),
        QuantizeStage("gptq", wide, ("b.0.q", "b.0.k")),
    )
    assert parse_recipe(recipe_text(recipe, ["a remark: #1"]), "x.yaml") == recipe


def test_only_recipes_of_searches_are_written_over(tmp_path) -> None:
    recipe = Recipe((QuantizeStage("gptq", Scheme(4, 128), ("o",)),))
    path = tmp_path / "r.yaml"
    write_recipe(path, recipe, ["first"])
    write_recipe(path, recipe, ["second"])
    assert "# second\n" in path.read_text()
    path.write_text("stages: []\n")
    with pytest.raises(CheckpointError, match="is no recipe of a search"):
        write_recipe(path, recipe, [])
