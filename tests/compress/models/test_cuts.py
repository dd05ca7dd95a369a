"""The plan of cuts: every row and column belongs to one rank, groups stay whole, and transformers cuts as we do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from decoder_configs import decoder_config
from tiny_configs import SIZES, VARIANTS
from transformers import AutoConfig

from compress.common.errors import ToolkitError
from compress.models.cuts import Cut, Cuts, Rank
from compress.models.mixers.mixer import Mixer
from compress.models.registry import FAMILIES
from compress.models.spec import ModelSpec
from runtime.core.model_config import parse_config


def cuts_of(spec: ModelSpec, index: int, count: int, multiple: int = 1) -> tuple[ModelSpec, dict[str, Cut]]:
    cuts = Cuts(Rank(index, count), lambda module: multiple)
    return spec.cut(cuts), cuts.found


def places(parts: tuple[slice, ...]) -> Iterator[int]:
    for part in parts:
        yield from range(part.start, part.stop)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (10, 5), (8, 2), (12, 3)])
def test_each_row_and_each_column_belongs_to_one_rank(heads: int, kv_heads: int, count: int) -> None:
    spec = decoder_config(heads, kv_heads, 16, 1, intermediate_size=224).spec
    ranks = [cuts_of(spec, index, count) for index in range(count)]
    for linear in (*spec.linears(), spec.head):
        found = [cuts[linear.name] for _, cuts in ranks]
        if linear.split == "rows":
            columns = [place for cut in found for place in places((cut.columns,))]
            assert columns == list(range(linear.in_features))
        else:
            rows = [place for cut in found for place in places(cut.rows)]
            # Where there are fewer key-value heads than ranks, several hold the same one.
            assert list(dict.fromkeys(rows)) == list(range(linear.out_features))
            is_repeated = kv_heads < count and linear.name.endswith(("k_proj", "v_proj"))
            assert (len(rows) > linear.out_features) == is_repeated
    for own, _ in ranks:
        mixer = own.blocks[0].mixer
        assert mixer.num_heads % mixer.num_kv_heads == 0
        assert sum(each.blocks[0].mixer.num_heads for each, _ in ranks) == heads
        assert [linear.out_features for linear in mixer.qkv] == [
            size * 16 for size in (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        ]


def config_of(family: str, **options: Any) -> dict[str, Any]:
    """Sizes of a tiny model as transformers completes them."""
    try:
        return AutoConfig.for_model(family, **(SIZES | VARIANTS[family] | options)).to_dict()
    except ValueError:
        pytest.skip("transformers has no such model")


@pytest.mark.parametrize("family", ["kimi_linear", "lfm2", "mamba2", "minimax", "qwen3_5_text", "qwen3_next"])
def test_states_are_shared_out(family: str) -> None:
    spec = parse_config(config_of(family)).spec
    for count in (2, 4):
        parts = [cuts_of(spec, index, count)[0] for index in range(count)]
        for layer, block in enumerate(spec.blocks):
            for name, field in block.mixer.state_fields.items():
                own = [part.blocks[layer].mixer.state_fields[name].nbytes(4) for part in parts]
                # Where there are fewer groups of heads than ranks, several compute what all heads of one read.
                assert sum(own) == field.nbytes(4) if name == "matrix" else sum(own) < 1.5 * field.nbytes(4)


def test_inner_channels_are_cut_between_groups() -> None:
    spec = decoder_config(4, 4, 16, 1, intermediate_size=7 * 128).spec
    bounds = [cuts_of(spec, index, 3, 128)[1]["model.layers.0.mlp.down_proj"].columns for index in range(3)]
    assert [(part.start, part.stop) for part in bounds] == [(0, 256), (256, 512), (512, 896)]


def test_a_cut_inside_of_a_group_takes_the_whole_group() -> None:
    spec = decoder_config(4, 4, 16, 1).spec
    parts = [cuts_of(spec, index, 4, 32)[1]["model.layers.0.self_attn.o_proj"] for index in range(4)]
    assert [(cut.columns.start, cut.columns.stop) for cut in parts] == [(0, 32), (0, 32), (32, 64), (32, 64)]
    assert [cut.padding for cut in parts] == [(0, 16), (16, 0), (0, 16), (16, 0)]


def test_one_rank_adds_the_bias_of_what_ranks_sum() -> None:
    spec = parse_config({**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True}).spec
    for index in range(2):
        mixer, mlp = cuts_of(spec, index, 2)[0].blocks[0].mixer, cuts_of(spec, index, 2)[0].blocks[0].mlp
        assert all(linear.bias for linear in (*mixer.qkv, *mlp.inputs))
        assert (mixer.output.bias, mlp.down.bias) == (index == 0, index == 0)


@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(2, 1, 3), (4, 4, 5), (6, 3, 7)])
def test_more_ranks_than_heads_are_refused(heads: int, kv_heads: int, count: int) -> None:
    with pytest.raises(ToolkitError) as error:
        cuts_of(decoder_config(heads, kv_heads, 16, 1).spec, 0, count)
    assert f"--tensor-parallel-size {heads}" in error.value.remedy


@pytest.mark.parametrize("family", ["jamba", "kimi_linear", "lfm2", "mamba2", "minimax", "qwen3_next", "youtu"])
def test_more_ranks_than_heads_of_other_mixers_are_refused(family: str) -> None:
    with pytest.raises(ToolkitError) as error:
        cuts_of(parse_config(config_of(family)).spec, 0, 200)
    assert "--tensor-parallel-size" in error.value.remedy


@dataclass(frozen=True)
class Uncut(Mixer):
    name: str = "mixer"


def test_a_mixer_without_a_rule_is_refused() -> None:
    with pytest.raises(ToolkitError) as error:
        Uncut().cut(Cuts(Rank(0, 2), lambda module: 1))
    assert "--tensor-parallel-size" in error.value.remedy


KINDS = {"colwise": "rows", "rowwise": "columns", "replicated_with_grad_allreduce": "", "mla_kv_a_proj": ""}
"""Part of a matrix that ranks divide, by transformers' word for it; "" for none."""
GATHERED = "linear_attn."
"""Modules that transformers computes whole on every rank."""


def planned(family: str) -> dict[str, str]:
    """Cuts in transformers' plan, by the name inside of a layer."""
    plan = AutoConfig.for_model(family).base_model_tp_plan or {}
    found = {}
    for name, word in plan.items():
        stem = re.sub("^packed_|_gather_output$|_split_input$", "", word)
        if (match := re.fullmatch(r"layers\.\*\.(.+)", name)) and stem in KINDS and GATHERED not in name:
            found[match[1]] = KINDS[stem]
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_cuts_are_those_of_transformers(family: str) -> None:
    spec, plan = parse_config(config_of(family)).spec, planned(family)
    _, found = cuts_of(spec, 0, 2)
    cuts, splits = {}, {}
    for index, block in enumerate(spec.blocks):
        linears, norms = (*block.linears, *block.routers), [norm for norm in block.norms if norm.has_weight]
        names = {each.name: each.name for each in linears} | {each.name: each.tensor for each in norms}
        for name, tensor in names.items():
            cut = found.get(f"{spec.block_name(index)}.{tensor}")
            cuts[name] = "" if cut is None else "rows" if cut.columns is None else "columns"
        splits |= {linear.name: linear.split for linear in block.linears}
    compared = plan.keys() & cuts.keys()
    assert {name: plan[name] for name in compared} == {name: cuts[name] for name in compared}
    for name, split in splits.items():
        assert cuts[name] in ("", "columns" if split == "rows" else "rows")
