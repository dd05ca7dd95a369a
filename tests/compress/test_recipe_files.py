"""Recipes: what YAML means, and what every mistake in it is answered with."""

import json
import re

import pytest

from calibration.parts import Part
from compress.checkpoint.weights import Activations, Fp8, Int, NMSparsity
from compress.common.errors import RecipeError
from compress.methods.signround import SignRoundOptions
from compress.recipe import CalibrationOptions, Recipe
from compress.recipe_file import bundled_recipes, load_recipe, parse_recipe
from compress.stages.factorize import FactorizeStage
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

BUNDLED = {
    "int2-gptq-outliers": ("gptq", Int(2, 64)),
    "int2-rotate-gptaq": ("gptaq", Int(2, 64)),
    "int2-signround": ("signround", Int(2, 64)),
    "int3-signround": ("signround", Int(3, 64)),
    "int4-awq": ("awq", Int(4, 128)),
    "int4-awq-kv4": ("awq", Int(4, 128)),
    "int4-gptq": ("gptq", Int(4, 128)),
    "int4-gptq-embedding8": ("gptq", Int(4, 128), Int(8, None)),
    "int4-rtn": ("rtn", Int(4, 128)),
    "int8-rtn": ("rtn", Int(8, None)),
    "lowrank-int4": ("svd-llm", Int(4, 32)),
    "lowrank-int8": ("svd-llm", Int(8, None)),
    "sparse24": ("sparsegpt",),
    "sparse24-int4": ("sparsegpt", Int(4, 128)),
    "w8a8-smoothquant": ("smoothquant", Int(8, None, activations=Activations.INT8)),
    "w8a8-fp8": ("rtn", Fp8(Activations.FP8)),
}

SEARCH = "smallest-kl"
"""Tested with searches."""


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_recipes_say_what_their_names_say(name: str) -> None:
    recipe = load_recipe(name)
    method, *schemes = BUNDLED[name]
    assert recipe.tensor_stages[0].method == method
    assert (recipe.find(RotateStage) is not None) == ("rotate" in name)
    assert [stage.scheme for stage in recipe.stages if isinstance(stage, QuantizeStage)] == schemes
    assert [str(stage.pattern) for stage in recipe.stages if isinstance(stage, PruneStage)] == (
        ["2:4"] if "sparse24" in name else []
    )
    assert (recipe.find(KVCacheStage) is not None) == name.endswith("kv4")
    assert recipe.name == name
    assert recipe.needs_calibration == (BUNDLED[name][0] != "rtn")


def test_learned_rounding_in_a_recipe() -> None:
    text = "stages:\n  - quantize: {method: signround, bits: 2, steps: 50, lr: 0.01, batch: 8}\n"
    (stage,) = parse_recipe(text, "r.yaml").stages
    assert stage == QuantizeStage("signround", Int(2, 128), options=SignRoundOptions(50, 0.01, 8))


def test_low_rank_in_a_recipe() -> None:
    text = "stages:\n  - factorize: {method: asvd, keep: 0.6, allocation: uniform, targets: ['*.mlp.*']}\n"
    assert parse_recipe(text, "r.yaml").stages == (FactorizeStage("asvd", 0.6, "uniform", targets=("*.mlp.*",)),)


def test_every_bundled_recipe_is_tested() -> None:
    assert set(bundled_recipes()) - {SEARCH} == set(BUNDLED)


def test_a_whole_recipe(tmp_path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "name: mixed\nseed: 7\ncalibration: {source: pydoc, num_calibration_samples: 8, max_seq_length: 128}\n"
        "stages:\n"
        "  - quantize: {method: gptq, bits: 3, group_size: 64, symmetric: false, ignore: [lm_head]}\n"
        "  - quantize: {method: rtn, bits: 8, group_size: -1, targets: ['*.down_proj']}\n"
    )
    assert load_recipe(str(path)) == Recipe(
        stages=(
            QuantizeStage("gptq", Int(3, 64, False), ignore=("lm_head",)),
            QuantizeStage("rtn", Int(8, None), targets=("*.down_proj",)),
        ),
        calibration=CalibrationOptions("pydoc", 8, 128),
        seed=7,
        name="mixed",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages:\n  - quantize:\n      bit: 4\n", r"r\.yaml:3.*'bit'"),
        ("stages:\n  - quantise: {}\n", r"r\.yaml:2.*'quantise'"),
        ("sed: 1\nstages: []\n", r"r\.yaml:1.*'sed'"),
        ("seed: 1\ncalibration: {num_samples: 3}\n", r"r\.yaml:2.*'num_samples'"),
        ("stages:\n  - quantize: {bits: 9}\n", r"r\.yaml:2.*bits=9.*2 to 8"),
        ("stages:\n  - quantize: {bits: four}\n", r"r\.yaml:2.*'four'"),
        ("stages:\n  - quantize: {bits: true}\n", r"r\.yaml:2.*True"),
        ("stages:\n  - quantize: {symmetric: 1}\n", r"r\.yaml:2.*symmetric: 1"),
        ("stages:\n  - quantize: {bits: 4,\n      bits: 3}\n", r"r\.yaml:3.*'bits'"),
        ("stages:\n  - quantize: {method: gtpq}\n", "'gtpq'"),
        ("stages:\n  - prune: {pattern: 2-4}\n", r"r\.yaml:2.*'2-4'"),
        ("stages:\n  - factorize: {keep: 1.5}\n", r"r\.yaml:2.*keep=1\.5.*above 0.*1"),
        ("stages:\n  - factorize: {rank: 8}\n", r"r\.yaml:2.*'rank'"),
        ("stages:\n  - prune: {sparsity: 2.0}\n", r"r\.yaml:2.*sparsity=2\.0.*above 0.*1"),
        ("stages:\n  - factorize: {keep: '0.5'}\n", r"r\.yaml:2.*'0\.5'"),
        ("stages:\n  - factorize: {allocation: model, target_size: [3]}\n", r"r\.yaml:2.*target_size"),
        (
            "stages:\n  - factorize: {keep: 0.5, allocation: model,\n      target_size: 3MB}\n",
            r"r\.yaml:2.*target_size",
        ),
        ("search: {target_size: {MB: 3}}\n", r"r\.yaml:1.*target_size"),
        ("stages:\n  - kv_cache: {max_kl: true}\n", r"r\.yaml:2.*max_kl.*True"),
        ("stages:\n  - quantize: {outlier_columns: .nan}\n", r"r\.yaml:2.*outlier_columns.*nan"),
        ("stages:\n  - quantize: {outlier_columns: inf}\n", r"r\.yaml:2.*outlier_columns.*inf"),
        ("stages: {}\n", r"r\.yaml:1"),
        ("stages: []\n", "the recipe has no stages"),
        ("- 1\n", r"r\.yaml:1"),
        ("calibration: {num_calibration_samples: 0}\nstages: [{quantize: {}}]\n", "samples=0"),
        ("", r"r\.yaml"),
        ("stages: [", r"r\.yaml"),
    ],
)
def test_mistakes_are_named_with_file_line_and_key(text: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    assert re.search(problem, str(caught.value))


@pytest.mark.parametrize(
    ("written", "meant"), [("1", 1.0), ("1e-2", 0.01), ("1.0e-2", 0.01), ("1E0", 1.0), (".5", 0.5)]
)
def test_numbers_as_people_write_them(written: str, meant: float) -> None:
    text = f"stages:\n  - quantize: {{method: gptaq, alpha: {written}}}\n  - kv_cache: {{max_kl: {written}}}\n"
    quantize, kv_cache = parse_recipe(text, "r.yaml").stages
    assert (quantize.options.alpha, kv_cache.max_kl) == (meant, meant)


def test_a_mixture_of_calibration_texts() -> None:
    head = "stages: [{quantize: {}}]\ncalibration:\n  num_calibration_samples: 8\n  source:"
    listed = parse_recipe(
        f"{head}\n    - {{source: bundled, weight: 0.5}}\n    - {{source: a.txt, weight: 1}}\n", "r.yaml"
    )
    assert listed.calibration.source == (Part("bundled", 0.5), Part("a.txt", 1.0))
    named = parse_recipe(f"{head} bundled:0.5,a.txt:1\n", "r.yaml")
    assert named.calibration.parts == listed.calibration.parts
    assert json.loads(json.dumps(listed.to_dict()))["calibration"]["source"][1] == {"source": "a.txt", "weight": 1.0}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("[{source: bundled, weight: 0}]", r"r\.yaml:2.*weight 0"),
        ("[{source: bundled, weight: much}]", r"r\.yaml:2.*'much'"),
        ("[{weight: 1}]", r"r\.yaml:2"),
        ("[{sorce: a}]", r"r\.yaml:2.*'sorce'"),
        ("[{source: a}, {source: a}]", r"r\.yaml:2"),
        ("[]", r"r\.yaml:2"),
        ("{bundled: 1}", r"r\.yaml:2"),
        ("'a:1,b'", r"r\.yaml:2.*'b'"),
        ("[{source: a}, {source: b, weight: 1000}]", r"r\.yaml:2.*64 calibration"),
    ],
)
def test_bad_mixtures_are_named_with_their_line(source: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"stages: [{{quantize: {{}}}}]\ncalibration: {{source: {source}}}\n", "r.yaml")
    assert re.search(problem, str(caught.value))


def test_unknown_recipe_lists_the_bundled_ones() -> None:
    with pytest.raises(RecipeError, match=r"int4-awk.*'int4-awq'"):
        load_recipe("int4-awk")


def test_yaml_cannot_build_python_objects() -> None:
    with pytest.raises(RecipeError):
        parse_recipe("stages:\n  - quantize: {method: !!python/object/apply:os.getcwd []}\n", "r.yaml")


ALIASES = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**5,
        "stages: " + "[" * 3000 + "]" * 3000,
        f"a0: &a0 [x]\n{ALIASES}stages: *a9\n",  # 9**9 values
        "stages: &a [*a]",
        "&a {stages: *a}",
        "seed: !!int abc\nstages: []",
        "seed: " + "9" * 10_000,
        "name: !!timestamp 99",
        "name: !!float abc",
        "seed: !!int ''",
        "seed: !!bool x",
        "stages:\n\t- quantize: {}",
        "? [a, b]\n: 1",
    ],
)
def test_hostile_files_are_refused_at_once(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    assert caught.value.remedy
    assert len(str(caught.value)) < 500


def test_a_pattern_may_stand_without_quotes() -> None:
    recipe = parse_recipe("stages:\n  - prune: {method: wanda, pattern: 2:4}\n", "r.yaml")
    assert recipe.stages == (PruneStage("wanda", NMSparsity(2, 4)),)


def test_a_file_that_is_no_text_is_named(tmp_path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\x80\x04\xff")
    with pytest.raises(RecipeError, match=r"weights\.yaml.*UTF-8"):
        load_recipe(str(path))
