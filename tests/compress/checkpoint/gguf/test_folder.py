"""The folder that is made of a GGUF file: config.json, tensors, cache, and refusals of what is missing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_models import FAMILIES, LLAMA3, quick_first, save_family, write_gguf
from tiny_models import load_reference

from compress.checkpoint.gguf.architectures.llama3_rope import find_parameters, frequency_factors
from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.tensors import model_config
from compress.checkpoint.gguf.tokenizer import tokenizer_files
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.forms import Q4K
from compress.common.errors import CheckpointError

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_reference(save_family(tmp_path_factory.mktemp("models") / "llama", "llama"), torch.float32)


def write(model, path: Path, kind: str = "q4_0", **changes) -> Path:
    write_gguf(model, path, lambda _: kind, **changes)
    return path


def config_of(path: Path) -> dict:
    return json.loads((folder_of(path) / "config.json").read_text())


def test_a_folder_that_was_made_is_found_without_torch(model, tmp_path):
    """The process of a server's API names the model, and another one loads it."""
    path = write(model, tmp_path / "model.gguf")
    folder = folder_of(path)
    code = (
        "import sys; from compress.checkpoint.gguf.folder import folder_of;"
        f"print(folder_of({str(path)!r}), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == f"{folder} False\n"


@pytest.mark.parametrize("name", quick_first(FAMILIES, "llama 3"))
def test_config_is_that_of_the_model(name, tmp_path):
    folder = save_family(tmp_path / "dense", name)
    source = load_reference(folder, torch.float32)
    found = config_of(write(source, tmp_path / "model.gguf"))
    expected = source.config.to_dict()
    expected["rope_parameters"].pop("partial_rotary_factor", None)
    left_out = {"quantization_config", "dtype", "hidden_act", "eos_token_id"}
    assert {key: value for key, value in found.items() if key not in left_out} == {
        key: expected[key] for key in found if key not in left_out
    }
    assert found["eos_token_id"] == [0, 2]
    assert found["rms_norm_eps"] == 1e-5


def test_types_become_schemes_and_weights(model, tmp_path):
    kinds = {"ffn_up": "q6_k", "ffn_down": "q8_0", "attn_q": "q4_k", "attn_k": "f16", "token_embd": "q5_0"}

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "q4_0")

    values = write_gguf(model, tmp_path / "model.gguf", kind_of)
    packed = PackedCheckpoint.open(folder_of(tmp_path / "model.gguf"))
    layer = "model.layers.1"
    schemes = {f"{layer}.mlp.up_proj": Int(6, 16), f"{layer}.mlp.down_proj": Int(8, 32)}
    schemes |= {f"{layer}.self_attn.o_proj": Int(4, 32), "model.embed_tokens": Int(5, 32)}
    schemes[f"{layer}.self_attn.q_proj"] = Q4K()
    assert {module: packed.scheme(module) for module in schemes} == schemes
    assert packed.tensor(f"{layer}.self_attn.k_proj.weight").dtype == torch.float16
    for module in (*schemes, f"{layer}.self_attn.k_proj"):
        assert torch.equal(
            packed.values(module, torch.float32) if module in schemes else packed.tensor(f"{module}.weight").float(),
            values[f"{module}.weight"],
        )
    assert packed.shape(f"{layer}.mlp.up_proj") == (512, 256)
    assert packed.weight_bytes(f"{layer}.mlp.up_proj") == 512 * 210
    assert packed.shape(f"{layer}.self_attn.q_proj") == (256, 256)
    assert packed.weight_bytes(f"{layer}.self_attn.q_proj") == 256 * 144
    assert sorted(packed.files.notes) == [
        "gguf: 1 tensors of type q5_0 are read as integer codes",
        "gguf: 2 tensors of type q4_k are read as they are",
        "gguf: 2 tensors of type q6_k are read as integer codes",
        "gguf: 2 tensors of type q8_0 are read as integer codes",
        "gguf: 6 tensors of type q4_0 are read as integer codes",
    ]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("f16", "float16"), ("f32", "float32"), ("bf16", "bfloat16"), ("q4_1", "bfloat16")]
)
def test_dtype_is_that_of_dense_matrices(kind, dtype, model, tmp_path):
    assert config_of(write(model, tmp_path / "model.gguf", kind))["dtype"] == dtype


def test_a_folder_is_made_once_and_again_when_the_file_changes(model, tmp_path):
    path = write(model, tmp_path / "name.gguf")
    folder = folder_of(path)
    assert folder.name == "name"
    (folder / "config.json").write_text("{}")
    assert folder_of(path) == folder
    assert (folder / "config.json").read_text() == "{}"
    os.utime(path, ns=(1, 1))
    assert folder_of(path) != folder
    assert folder_of(tmp_path) == tmp_path


def test_a_folder_that_cannot_be_written_is_refused(model, tmp_path, monkeypatch):
    path = write(model, tmp_path / "name.gguf")
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        folder_of(path)


def test_a_folder_with_a_file_alone_names_the_file(model, tmp_path):
    path = write(model, tmp_path / "name.gguf")
    with pytest.raises(CheckpointError, match=f"Name the file itself, {path}"):
        TensorFiles.open(tmp_path)


REFUSED = {
    "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    "part": ({"split.count": 3}, "one of 3 parts, and its name says 1.*Name it NAME-00001-of-00003.gguf"),
    "layers": ({"llama.block_count": 3}, "tensors of 2 layers, and block_count is 3"),
    "no layers": ({"llama.block_count": None}, "block_count is None"),
    "no heads": ({"llama.attention.head_count": None}, r"llama.attention.head_count is missing"),
    "heads": ({"llama.attention.head_count": 3}, "has 256 rows for 3 heads"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": "x"}, "where a number is needed"),
    "base": ({"llama.rope.freq_base": 0.0}, "not above 1"),
    "stretch": ({"llama.rope.scaling.type": "su"}, "stretched by 'su' are not read"),
    "values": ({"llama.attention.value_length": 32}, "values have heads of 32 channels, keys of 64"),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, "of kind 't5' are not read"),
    "words": ({"tokenizer.ggml.pre": "bloom"}, "tokenizer.ggml.pre 'bloom'.*gpt-2"),
    "tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "types": ({"tokenizer.ggml.token_type": [1]}, "1 entries for 264 tokens"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c', which are not two tokens"),
    "named token": ({"tokenizer.ggml.bos_token_id": 5000}, "5000, outside of 264 tokens"),
    "twice": ({"tokenizer.ggml.tokens": ["a"] * 264}, "263 texts twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_file_and_the_reason(case, model, tmp_path):
    changes, reason = REFUSED[case]
    path = write(model, tmp_path / "name.gguf", **changes)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        folder_of(path)
    assert str(path) in str(refusal.value) or case == "architecture"
    assert refusal.value.remedy
    assert not [*tmp_path.glob("cache/**/name"), *tmp_path.glob("cache/**/.name*")]


WRONG = (None, 0, 2**31, -1.5, float("nan"), float("inf"), "text", [], [1, 2], ["a", "b"], [0.5], [[1]], True)


def test_metadata_of_wrong_types_are_read_or_refused_in_one_line(model, tmp_path):
    file = GGUFFile.open(write(model, tmp_path / "name.gguf"))
    outcomes = set()
    for key in file.metadata:
        for value in WRONG:
            changed = replace(file, metadata={**file.metadata, key: value})
            try:
                tokenizer_files(changed.metadata, model_config(changed)["vocab_size"])
                outcomes.add("read")
            except CheckpointError as error:
                outcomes.add("refused" if "\n" not in str(error) else str(error))
    assert outcomes == {"read", "refused"}


def test_parameters_of_llama_3_are_found_from_their_factors():
    for factor in (8.0, 32.0):
        parameters = LLAMA3 | {"factor": factor}
        factors = torch.tensor(frequency_factors(parameters, 128)).tolist()
        assert find_parameters(factors, LLAMA3["rope_theta"]) == {
            key: value for key, value in parameters.items() if key != "rope_theta"
        }
    assert find_parameters([1.0] * 64, 1e4) == {"rope_type": "default"}
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        find_parameters([1.0] * 32 + [3.0] * 32, 1e4)
