"""config.json with values of every wrong type: each is served, compressed or refused by its key, nothing else."""

import json
from contextlib import suppress

import pytest
import runs
from covering import sample
from folders import change_config, private_copy
from tiny_configs import SIZES

from compress.checkpoint.config import read_config
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError, ToolkitError
from compress.models.config import MAX_LAYERS, MAX_SIZE
from compress.models.registry import FAMILIES
from compress.stages.quantize import QuantizeStage
from runtime.core.model_config import parse_config

VALUES = (None, "abc", [], [1], {}, {"a": 1}, -1, 0, 10**20, True, False, 1.5, float("nan"), float("inf"))
ROPE = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor")
KEYS = (
    *SIZES,
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "eos_token_id",
    "dtype",
    "is_causal",
    "quantization_config",
    "compression_config",
    "model_type",
)


@pytest.mark.parametrize("family", sample(sorted(FAMILIES, key="llama".__ne__), quick=12))
def test_no_value_of_any_key_is_more_than_refused(family: str) -> None:
    config = {"model_type": family, **SIZES, "use_sliding_window": True, "sliding_window": 8}
    kinds = ("default", "linear", "llama3", "yarn")
    cases = [{key: value} for value in VALUES for key in KEYS]
    cases += [
        {"rope_parameters": {"rope_type": kind, "factor": 2.0, key: value}}
        for value in VALUES
        for key in ROPE
        for kind in kinds
    ]
    for case in cases:
        with suppress(ToolkitError):
            parse_config(config | case)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("num_attention_heads", 0),
        ("num_hidden_layers", MAX_LAYERS + 1),
        ("vocab_size", MAX_SIZE + 1),
        ("intermediate_size", {"a": 1}),
        ("rms_norm_eps", float("nan")),
        ("attention_bias", "yes"),
        ("rope_parameters", [1]),
        ("architectures", 5),
        ("architectures", [1]),
        ("model_type", ["llama"]),
        ("bos_token_id", "abc"),
        ("dtype", "abc"),
        ("quantization_config", [1]),
    ],
)
def test_a_plan_refuses_a_value_by_its_key(tiny_model, tmp_path, key: str, value: object) -> None:
    folder = private_copy(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key if key != "dtype" else "abc"):
        runs.prepared(folder, tmp_path / "out", QuantizeStage("rtn", Int(4, 64)))


def test_verification_tells_a_value_that_defines_no_model(tiny_model, tmp_path) -> None:
    folder = change_config(private_copy(tiny_model(), tmp_path / "model"), hidden_size="128")
    assert any("hidden_size" in problem for problem in verify_structure(folder).problems)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{}", b"\0", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000])
def test_a_file_that_is_no_object_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_window_of_more_layers_than_there_are_is_refused(tiny_model, tmp_path) -> None:
    folder = change_config(private_copy(tiny_model("mistral"), tmp_path / "m"), layer_types=[["full_attention"]] * 3)
    with pytest.raises(CheckpointError, match="layer_types"):
        runs.prepared(folder, tmp_path / "out", QuantizeStage("rtn", Int(4, 64)))
