"""Values of config.json that define no model: diagnosis, compression and serving refuse them alike."""

import math
from pathlib import Path

import pytest
from folders import change_config, private_copy

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import draft_model_path
from compress.common.errors import CheckpointError, UnsupportedModelError
from compress.doctor.examine import examine
from compress.pipeline.prepare import RunRequest, prepare
from compress.recipe import Recipe
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import read_model

IMPOSSIBLE = {
    "hidden_size": [10**12, 0, -1, "256", 256.5],
    "intermediate_size": [0, 2**40],
    "num_hidden_layers": [0, -6, 10**9],
    "num_attention_heads": [0],
    "num_key_value_heads": [3, 0],
    "head_dim": [0],
    "vocab_size": [0],
    "max_position_embeddings": [0],
    "rms_norm_eps": [-1, math.nan],
    "attention_bias": ["yes"],
    "tie_word_embeddings": ["yes"],
    "rope_scaling": [{"rope_type": "linear", "factor": 0}],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return private_copy(draft_model_path(), tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in IMPOSSIBLE.items() for value in values], ids=str
)
def test_all_commands_refuse_alike(model: Path, key: str, value: object) -> None:
    change_config(model, **{key: value})
    diagnosis = examine(model)
    assert "loaded by" not in diagnosis.facts
    recipe = Recipe((QuantizeStage("rtn", Int(4, 32)),))
    with pytest.raises(CheckpointError) as not_packed:
        prepare(RunRequest(model, str(model), recipe, model / "out"), dry_run=True)
    with pytest.raises(CheckpointError) as not_served:
        read_model(PackedCheckpoint.open(model))
    assert not_packed.value.problem == not_served.value.problem
    assert not_served.value.problem in [each.problem for each in diagnosis.findings if each.severity == "error"]


@pytest.mark.parametrize(
    "changes", [{"is_causal": False}, {"hidden_act": "mish"}, {"partial_rotary_factor": 0.5}], ids=str
)
def test_a_model_that_only_others_load_is_no_error(model: Path, changes: dict[str, object]) -> None:
    change_config(model, **changes)
    diagnosis = examine(model)
    assert diagnosis.ok
    assert [each.kind for each in diagnosis.findings] == ["unsupported-model"]
    assert diagnosis.facts["loaded by"].startswith("transformers")
    with pytest.raises(UnsupportedModelError):
        read_model(PackedCheckpoint.open(model))


def test_engines_are_named_for_sound_models_only(model: Path) -> None:
    assert examine(model).facts["loaded by"].startswith("this runtime")
    (model / "tokenizer.json").write_text("{")
    diagnosis = examine(model)
    assert not diagnosis.ok
    assert "loaded by" not in diagnosis.facts
