"""Mixes give every matrix the type that llama.cpp's quantizer gave it in small models, as stored in llama_types.json:
types other than a mix's base, by kind of matrix, in the order of the layers."""

import json
from pathlib import Path

import pytest

from compress.checkpoint.gguf.mixes import ALIASES, MIXES, TYPES, Place, find_mix
from compress.checkpoint.gguf.types.base import BLOCK_TYPES
from compress.common.errors import SchemeError
from compress.gguf_recipe import stages_of

MODELS = json.loads(Path(__file__).with_name("llama_types.json").read_text())["models"]


def unpacked(runs: str) -> list[str]:
    """Returns the types of `q6_k x 2 q4_k`."""
    words = runs.split()
    counts = {place - 1: int(words[place + 1]) for place, word in enumerate(words) if word == "x"}
    names = [(place, word) for place, word in enumerate(words) if word in BLOCK_TYPES]
    return [name for place, name in names for _ in range(counts.get(place, 1))]


@pytest.mark.parametrize(("model", "mix"), [(model, mix) for model in MODELS for mix in MODELS[model]["types"]])
def test_types_are_those_of_llama_cpp(model, mix):
    facts, expected = dict(MODELS[model]["model"]), MODELS[model]["types"][mix]
    kinds, columns, columns_down = facts.pop("kinds"), facts.pop("columns"), facts.pop("columns_down")
    for kind in kinds:
        own = columns_down if kind == "ffn_down" else columns
        layers = 1 if kind in ("output", "token_embd") else facts["layers"]
        found = [MIXES[mix].type_of(Place(kind, own, layer, **facts)) for layer in range(layers)]
        assert found == (unpacked(expected[kind]) if kind in expected else [MIXES[mix].base] * layers)


def test_names():
    assert [find_mix(name).number for name in ALIASES] == [MIXES[f"{name}_m"].number for name in ALIASES]
    assert set(TYPES) <= set(BLOCK_TYPES)
    with pytest.raises(SchemeError, match="q4_k_m"):
        find_mix("q4_k_x")


def test_stages_give_each_matrix_its_type_and_leave_floats_out():
    types = {f"model.layers.{layer}.mlp.experts.{expert}.up_proj": "q4_0" for layer in (0, 1) for expert in range(8)}
    types |= {f"model.layers.1.mlp.experts.{expert}.down_proj": "q6_k" for expert in range(8)}
    first, second = stages_of(types | {"model.layers.0.self_attn.o_proj": "f16"}, "gptq")
    assert (first.scheme.bits, first.scheme.group_size, first.targets) == (4, 32, ())
    assert first.ignore == ("model.layers.0.self_attn.o_proj",)
    assert (second.scheme.word, second.targets) == ("q6_k", ("model.layers.1.mlp.experts.*.down_proj",))
