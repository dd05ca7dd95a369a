"""A family describes the model that transformers builds from the same config."""

import math
from pathlib import Path

import pytest
from tiny_configs import DECAYS, SIZES, VARIANTS
from tiny_models import save_tiny_model
from transformers import AutoConfig

from compress.checkpoint.dequantized import open_source
from compress.common.errors import CheckpointError
from compress.models.architecture import architecture_of
from compress.models.registry import FAMILIES, find_family, register
from compress.models.spec import ModelSpec
from runtime.backends.fused_layers import layers_unsupported

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def describe(model_type: str, **options: object) -> ModelSpec:
    family = find_family(model_type)
    assert family is not None
    return family({"model_type": model_type, **SIZES, **options})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        *VARIANTS.items(),
    ],
)
def test_parameters_are_those_of_transformers(
    model_type: str, options: dict[str, object], tied: bool, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, model_type, **options, tie_word_embeddings=tied)
    files = open_source(folder)[0]
    stored = {name: tuple(files.shape(name)) for name in files.names() if not name.endswith(DECAYS)}
    spec = describe(model_type, **options, tie_word_embeddings=tied)
    head = {f"{spec.names.head}.weight": (SIZES["vocab_size"], SIZES["hidden_size"])}
    assert spec.parameters() == (stored | head if tied else stored)
    assert spec.weight_bytes(4) == 4 * sum(math.prod(shape) for shape in stored.values())
    config = AutoConfig.for_model(model_type, **(SIZES | options), tie_word_embeddings=tied)
    assert len(spec.blocks) == config.num_hidden_layers
    completed = describe(**config.to_dict())
    assert completed.parameters() == spec.parameters(), "transformers fills in what config.json leaves out"


def test_every_family_has_a_variant_with_all_features() -> None:
    assert set(FAMILIES) == set(VARIANTS)


def test_the_table_of_the_docs_is_true() -> None:
    text = (Path(__file__).parents[3] / "docs/families.md").read_text()
    registered = text.partition("\n## ")[0]
    lines = [line for line in registered.splitlines() if line.startswith("| `")][1:]
    cells = (line.strip("| ").split(" | ") for line in lines)
    rows = {model_type.strip("`"): tuple(rest) for model_type, _, *rest in cells}
    assert list(rows) == list(FAMILIES)
    for model_type, row in rows.items():
        spec = describe(model_type, **VARIANTS[model_type])
        names = architecture_of(spec)
        fused = not layers_unsupported(spec)
        yes = {True: "yes", False: "no"}
        # Those of all experts are one place.
        places = {each.smooth_layer.rpartition(".")[2] for each in names.mappings}
        expected = "yes", str(len(places)), yes[names.stream is not None]
        assert row == (*expected, "all layers in one call" if fused else "layer by layer"), model_type


def test_names_for_compression() -> None:
    llama = architecture_of(describe("llama"))
    assert (llama.blocks, llama.embedding, llama.final_norm, llama.head) == (
        "model.layers",
        "model.embed_tokens",
        "model.norm",
        "lm_head",
    )
    assert llama.siblings == (QKV, GATE_UP)
    assert [(each.smooth_layer, each.balance_layers, each.parent) for each in llama.mappings] == [
        ("input_layernorm", QKV, "self_attn"),
        ("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj"),
        ("post_attention_layernorm", GATE_UP, "mlp"),
        ("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
    ]
    assert llama.stream is not None
    assert llama.stream.writers == ("self_attn.o_proj", "mlp.down_proj")
    assert llama == architecture_of(describe("qwen3"))


def test_all_that_reads_the_norm_of_a_mixture_is_smoothed_together() -> None:
    names = architecture_of(describe("qwen2_moe", **VARIANTS["qwen2_moe"] | {"mlp_only_layers": []}))
    mlps = [*(f"mlp.experts.{index}" for index in range(8)), "mlp.shared_expert"]
    _, _, norm, *inside = names.mappings
    assert norm.smooth_layer == "post_attention_layernorm"
    assert norm.balance_layers == tuple(f"{mlp}.{part}" for mlp in mlps for part in ("gate_proj", "up_proj"))
    assert norm.routers == names.routers == ("mlp.gate", "mlp.shared_expert_gate")
    assert (norm.parent, norm.observed) == ("mlp", "mlp.experts")
    assert [(each.smooth_layer, each.balance_layers) for each in inside] == [
        (f"{mlp}.up_proj", (f"{mlp}.down_proj",)) for mlp in mlps
    ]


def test_fused_projections_are_neither_smoothed_nor_rotated() -> None:
    phi3 = architecture_of(describe("phi3"))
    assert (phi3.siblings, phi3.mappings, phi3.stream) == ((), (), None)


def test_outputs_are_split_by_columns_and_inputs_by_rows() -> None:
    split = {linear.name.rpartition(".")[2]: linear.split for linear in describe("llama").linears()}
    assert {name for name, kind in split.items() if kind == "rows"} == {"o_proj", "down_proj"}


def test_a_token_takes_keys_and_values_of_every_layer() -> None:
    layers, heads = SIZES["num_hidden_layers"], SIZES["num_key_value_heads"]
    assert describe("llama").kv_token_bytes(lambda key, value: 2 * (key + value)) == layers * heads * 2 * 2 * 16


def test_a_name_belongs_to_one_family() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3", "phi3"} <= set(FAMILIES)
    assert find_family("gpt2") is None
    with pytest.raises(ValueError, match="llama"):
        register("llama")(describe)


def test_sizes_that_define_no_model() -> None:
    with pytest.raises(CheckpointError, match="3 key-value"):
        describe("llama", num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="hidden_size"):
        describe("llama", hidden_size="64")
