"""User input of a search: candidates, targets, search sections of recipes; and the recipes that a search writes."""

import os
import re
from dataclasses import replace

import pytest

from calibration.parts import Part
from compress.checkpoint.weights import Exl3, Int, NMSparsity
from compress.common.cli import size_in_bytes
from compress.common.errors import CheckpointError, RecipeError, SchemeError, ToolkitError
from compress.common.files import atomic_file
from compress.recipe import CalibrationOptions, Recipe
from compress.recipe_file import load_recipe, load_work, parse_recipe, parse_work
from compress.search.run import check_recipe_file, recipe_text, write_recipe
from compress.search.space import (
    DEFAULT_CANDIDATES,
    Candidate,
    Goal,
    LayerGroup,
    SearchRequest,
    float_words,
    parse_candidates,
)
from compress.stages.factorize import FactorizeStage
from compress.stages.finish import FinishStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage


def test_menu_words() -> None:
    assert parse_candidates("w2g64, w3g64asym,w8,w2g64") == tuple(
        map(Candidate, (Int(2, 64), Int(3, 64, False), Int(8, None)))
    )
    assert ",".join(map(str, parse_candidates(DEFAULT_CANDIDATES))) == DEFAULT_CANDIDATES


@pytest.mark.parametrize(
    ("word", "stages"),
    [
        ("rank0.8", (FactorizeStage("svd-llm", 0.8, "uniform", targets=("q",)),)),
        (
            "asvd0.75w8",
            (
                FactorizeStage("asvd", 0.75, "uniform", targets=("q",)),
                QuantizeStage("gptq", Int(8, None), targets=("q",)),
            ),
        ),
        ("2:4", (PruneStage(pattern=NMSparsity(2, 4), targets=("q",)),)),
        (
            "4:8w4g128asym",
            (
                PruneStage(pattern=NMSparsity(4, 8), targets=("q",)),
                QuantizeStage("gptq", Int(4, 128, False), targets=("q",)),
            ),
        ),
        ("dense", ()),
    ],
)
def test_words_for_rank_and_sparsity(word: str, stages: tuple) -> None:
    candidate, _ = parse_candidates(f"{word},w8")
    assert str(candidate) == word
    assert candidate.stages("gptq", ("q",)) == stages


def test_forms_know_about_how_many_bits_they_take() -> None:
    bits = [candidate.bits_per_weight for candidate in parse_candidates("dense,2:4,2:4w4g128,rank0.5,rank0.5w8,w3")]
    assert bits == [16, 9, 3, 8, 4, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w4", " 1 .*--candidates"),
        ("w4g128,four", "'four'"),
        ("w4,", "''"),
        ("w4,2:4rank0.8", r"2:4rank0.8"),
        ("w4,rank1.0", r"keep=1\.0 .*keep 0\.8"),
        ("w4,2:3", " 2:3 "),
        ("w4,4:8w4g4", r" 4 .*4:8.*--group-size"),
    ],
)
def test_menus_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        parse_candidates(text)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("800mb", 8 * 10**8), ("123", 123)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["5 parsecs", "-5GB", "GB", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RecipeError, match=f"size {text!r}"):
        size_in_bytes(text)


@pytest.mark.parametrize("given", [{}, {"kl": 0.1, "size": 5}, {"kl": 0.0}, {"bits_per_weight": float("inf")}])
def test_a_search_has_one_target_above_zero(given: dict) -> None:
    with pytest.raises(RecipeError, match="--target-bpw"):
        Goal(**given)


@pytest.mark.parametrize("method", ["awq", "gtpq"])
def test_methods_without_sensitivities_of_single_layers_are_refused(method: str) -> None:
    with pytest.raises(RecipeError, match="gptq"):
        SearchRequest(Goal(kl=0.1), method=method)


def test_a_search_in_a_recipe() -> None:
    text = (
        "seed: 3\ncalibration: {num_calibration_samples: 8, max_seq_length: 64}\n"
        "search:\n  target_size: 5 MB\n  candidates: [w2g64, w4g128]\n  method: rtn\n  measured: 4\n"
        "  ignore: [o_proj]\n"
    )
    expected = SearchRequest(
        Goal(size=5_000_000),
        (Candidate(Int(2, 64)), Candidate(Int(4, 128))),
        "rtn",
        4,
        ignore=("o_proj",),
        calibration=CalibrationOptions(samples=8, length=64),
        seed=3,
        name="r",
    )
    assert parse_work(text, "r.yaml") == expected
    with pytest.raises(RecipeError, match=r"r\.yaml .*compress run"):
        parse_recipe(text, "r.yaml")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{max_kl: 0.05, target_bpw: 3}", r"r\.yaml:1.*2"),
        ("{max_lk: 0.05}", r"r\.yaml:1.*'max_lk'.*'max_kl'"),
        ("{max_kl: 1, candidates: [w4]}", r"r\.yaml:1.*1 leaves"),
        ("{target_size: huge}", r"r\.yaml:1.*'huge'"),
        ("{max_kl: 1}\nstages: []", r"r\.yaml:1"),
    ],
)
def test_mistakes_in_a_search_are_named_with_their_line(body: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_work(f"search: {body}\n", "r.yaml")
    assert re.search(said, str(caught.value))


def test_the_bundled_search() -> None:
    search = load_work("smallest-kl")
    assert isinstance(search, SearchRequest)
    assert (search.goal, ",".join(map(str, search.candidates))) == (Goal(kl=0.05), DEFAULT_CANDIDATES)
    with pytest.raises(RecipeError, match=r"smallest-kl.yaml"):
        load_recipe("smallest-kl")


UNITS = (
    LayerGroup(0, ("b.0.q", "b.0.k"), ((8, 8), (4, 8))),
    LayerGroup(0, ("b.0.o",), ((8, 8),)),
    LayerGroup(1, ("b.1.o",), ((8, 8),)),
)


@pytest.mark.parametrize("source", ["it's mine: #1.txt", (Part("bundled", 0.25), Part("a.txt", 0.75))])
def test_a_written_recipe_reads_as_what_was_meant(source) -> None:
    search = SearchRequest(Goal(kl=0.1), calibration=CalibrationOptions(source, 8, 64), seed=5, name="search-kl0.1")
    narrow, wide = Int(3, 64, False), Int(8, None)
    recipe = search.recipe(dict(zip(UNITS, map(Candidate, (wide, narrow, narrow)), strict=True)))
    assert recipe.stages == (
        QuantizeStage("gptq", narrow, targets=("b.0.o", "b.1.o")),
        QuantizeStage("gptq", wide, targets=("b.0.q", "b.0.k")),
    )
    assert parse_recipe(recipe_text(recipe, ["a remark: #1"]), "x.yaml") == recipe


def test_a_search_that_finishes_writes_the_stage_last() -> None:
    search = parse_work("search: {max_kl: 0.1, finish: kl}\n", "r.yaml")
    assert isinstance(search, SearchRequest)
    recipe = search.recipe(dict.fromkeys(UNITS, Candidate(Int(4, 64))))
    assert recipe.stages == (
        QuantizeStage("gptq", Int(4, 64), targets=("b.0.q", "b.0.k", "b.0.o", "b.1.o")),
        FinishStage(),
    )
    assert parse_recipe(recipe_text(recipe, []), "r.yaml") == recipe
    asked = replace(search, finish=FinishStage(steps=7, learning_rate=0.01, rank=2))
    recipe = asked.recipe(dict.fromkeys(UNITS, Candidate(Int(4, 64))))
    assert parse_recipe(recipe_text(recipe, []), "r.yaml") == recipe
    with pytest.raises(RecipeError, match=r"r\.yaml:1.*loss 'mse'.*kl"):
        parse_work("search: {max_kl: 0.1, finish: mse}\n", "r.yaml")


def test_rank_and_sparsity_are_written_as_stages_of_their_own() -> None:
    search = SearchRequest(Goal(kl=0.1), calibration=CalibrationOptions(samples=8, length=64), name="n")
    low, pruned, _ = parse_candidates("asvd0.75w8,2:4w4g64,dense")
    recipe = search.recipe(dict(zip(UNITS, (low, pruned, Candidate()), strict=True)))
    assert [type(stage) for stage in recipe.stages] == [PruneStage, QuantizeStage, FactorizeStage, QuantizeStage]
    assert [stage.targets for stage in recipe.stages] == [
        ("b.0.o",),
        ("b.0.o",),
        ("b.0.q", "b.0.k"),
        ("b.0.q", "b.0.k"),
    ]
    assert parse_recipe(recipe_text(recipe, []), "x.yaml") == recipe
    with pytest.raises(RecipeError, match=r"0\.1"):
        search.recipe(dict.fromkeys(UNITS, Candidate()))


@pytest.mark.parametrize(
    "word",
    [
        *float_words(),
        "w3exl3",
        "w2.5exl3",
        "w4g64asym",
        "w4a8g64asym",
        "w4a4",
        "w8",
        "2:4w4g128",
        "4:8",
        "rank0.8w8",
        "asvd0.75",
    ],
)
def test_the_stages_of_every_candidate_are_read_back(word: str) -> None:
    (candidate, _) = parse_candidates(f"{word},dense")
    recipe = Recipe(candidate.stages("gptq", ("q", "re:.*k")), name="x")
    assert parse_recipe(recipe_text(recipe, []), "x.yaml") == recipe


def test_trellis_codes_have_their_own_method_and_widths() -> None:
    (candidate, same, _) = parse_candidates("w2exl3,exl3,w4exl3,w4g64")
    assert (str(candidate), str(same), same.bits_per_weight) == ("w2exl3", "exl3", 4)
    (stage,) = candidate.stages("gptq", ("q",))
    assert isinstance(stage, QuantizeStage)
    assert (stage.method, stage.scheme) == ("trellis", Exl3(2, "mul1"))
    (rounded,) = candidate.stages("rtn", ("q",))
    assert isinstance(rounded, QuantizeStage)
    assert rounded.method == "rtn"
    with pytest.raises(SchemeError, match="nvfp4 has 4 bits"):
        parse_candidates("w3nvfp4,w8")


@pytest.mark.parametrize("word", ["rank0.8", "asvd0.8", "2:4"])
def test_rounding_to_nearest_goes_with_nothing_that_looks_at_inputs(word: str) -> None:
    with pytest.raises(RecipeError, match=f"^{word} .*rtn.*gptq"):
        SearchRequest(Goal(kl=0.1), parse_candidates(f"{word},w8"), "rtn")
    assert SearchRequest(Goal(kl=0.1), parse_candidates("svd0.8,w8"), "rtn").method == "rtn"


def test_menus_of_recipes_have_patterns_without_quotes() -> None:
    search = parse_work("search: {max_kl: 1, candidates: [2:4, rank0.8, dense]}\n", "r.yaml")
    assert isinstance(search, SearchRequest)
    assert list(map(str, search.candidates)) == ["2:4", "rank0.8", "dense"]


def test_only_recipes_of_searches_are_written_over(tmp_path) -> None:
    recipe = Recipe((QuantizeStage("gptq", Int(4, 128), targets=("o",)),))
    path = tmp_path / "r.yaml"
    write_recipe(path, recipe, ["first"])
    write_recipe(path, recipe, ["second"])
    assert "# second\n" in path.read_text()
    path.write_text("stages: []\n")
    with pytest.raises(CheckpointError, match=f"^{path} .*--recipe"):
        write_recipe(path, recipe, [])


def test_a_pipe_is_neither_read_nor_replaced(tmp_path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="pipe"):
        check_recipe_file(path)
    with pytest.raises(CheckpointError, match="pipe"), atomic_file(path):
        pass
    assert path.is_fifo()
