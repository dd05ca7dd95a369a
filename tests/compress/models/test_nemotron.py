"""Nemotron-H as it is published: kinds of layers by symbols, and tensors under other names than in transformers."""

import re

import pytest
from tiny_configs import SIZES, VARIANTS
from transformers import AutoConfig

from compress.common.errors import CheckpointError
from compress.models.mixers.attention import Attention
from compress.models.mlp import MLP, Mixture
from compress.models.registry import find_family
from compress.models.spec import ModelSpec
from compress.models.wrappers import TextNames, layouts_of

CONFIG = {"model_type": "nemotron_h", **SIZES, **VARIANTS["nemotron_h"]}


def describe(**options: object) -> ModelSpec:
    family = find_family("nemotron_h")
    assert family is not None
    return family({name: value for name, value in {**CONFIG, **options}.items() if value is not None})


@pytest.mark.parametrize("pattern", ["M-M*-E", "E*", "M" * 4 + "*"])
def test_kinds_of_layers_by_symbols(pattern: str) -> None:
    published = {**CONFIG, "hybrid_override_pattern": pattern}
    del published["layers_block_type"]
    kinds = AutoConfig.for_model(**published).layers_block_type
    assert describe(layers_block_type=None, hybrid_override_pattern=pattern) == describe(layers_block_type=kinds)
    parts = [block.mixer or block.mlp for block in describe(layers_block_type=kinds).blocks]
    found = {Attention: "*", MLP: "-", Mixture: "E"}
    assert "".join(found.get(type(part), "M") for part in parts) == pattern


@pytest.mark.parametrize("pattern", ["", "MX", 3, ["*", None]])
def test_layers_of_no_known_kind_are_refused(pattern: object) -> None:
    with pytest.raises(CheckpointError, match="hybrid_override_pattern"):
        describe(layers_block_type=None, hybrid_override_pattern=pattern)


def test_published_names_are_those_of_transformers_in_another_module() -> None:
    own = sorted(name for name in describe().parameters() if name.startswith("model."))
    published = [name.replace("model.", "backbone.", 1) for name in own]
    ahead = "mtp.layers.0.norm.weight"
    names = TextNames.find([*published, "lm_head.weight", ahead], layouts_of(CONFIG))
    assert names is not None
    assert [names.own(name) for name in published] == own
    assert [names.stored(name) for name in own] == published
    assert names.own(ahead) == names.stored(ahead) == ahead
    assert not names.others
    assert TextNames.find(own, layouts_of(CONFIG)) is None


def test_patterns_fit_modules_by_both_names() -> None:
    names = TextNames("backbone", "lm_head")
    pattern = names.pattern("model.layers.1.mixer.up_proj").removeprefix("re:")
    fitting = ["model.layers.1.mixer.up_proj", "backbone.layers.1.mixer.up_proj"]
    others = ["model.layers.11.mixer.up_proj", "backbone.layers.1.mixer.experts.1.up_proj", "model.layers.1.mixer.up"]
    assert [name for name in fitting + others if re.match(pattern, name)] == fitting
