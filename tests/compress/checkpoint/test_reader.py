"""Opening model folders, dense and packed: what is fine, and every way in which a folder can be wrong."""

import json
import re
import shlex
import shutil
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiers import examples

from compress.checkpoint.config import is_tied, read_config, write_config
from compress.checkpoint.locate.file_names import INDEX_FILE
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError

UP = "model.layers.1.mlp.up_proj"


def test_dense(dense_folder):
    dense = PackedCheckpoint.open(dense_folder)
    assert (dense.format, dense.modules, dense.dtype, dense.tied) == ("dense", [], torch.bfloat16, True)
    assert dense.scheme(UP) is None
    assert torch.equal(dense.weight(UP), dense.tensor(f"{UP}.weight"))
    assert dense.shape(UP) == (256, 128)
    assert UP in dense.dense_linears()
    assert "model.embed_tokens" not in dense.dense_linears()
    with pytest.raises(CheckpointError, match=r"'nothing\.weight' .* \d+ "):
        dense.weight("nothing")


def test_packed(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "p", lambda module: Int(3, 32, False) if "mlp" in module else None)
    packed = PackedCheckpoint.open(tmp_path / "p")
    assert packed.format == "compressed-tensors"
    assert packed.modules == sorted(weights)
    assert packed.scheme(UP) == Int(3, 32, False)
    assert packed.shape(UP) == (256, 128)
    weight = packed.weight(UP)
    assert isinstance(weight, CodedWeight)
    assert torch.equal(weight.qweight, weights[UP].qweight)
    assert torch.equal(weight.zero_points, weights[UP].zero_points)
    assert weight.scales.dtype == torch.bfloat16
    assert isinstance(packed.weight("model.layers.1.self_attn.q_proj"), torch.Tensor)
    assert "model.layers.1.self_attn.q_proj.bias" in packed.dense_names()
    assert packed.weight_bytes(UP) == 256 * 128 * 3 // 8 + 256 * 4 * 2 + 256 * 4 * 3 // 8


def test_tied_when_the_config_does_not_say():
    assert is_tied({}, ["model.embed_tokens.weight"])
    assert not is_tied({}, ["lm_head.weight_packed"])
    assert is_tied({"tie_word_embeddings": True}, ["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"type": "float"}, "4-bit"), ({"strategy": "block"}, r"\bblock\b"), ({"num_bits": 9}, "bits=9")],
)
def test_schemes_out_of_reach(dense_folder, pack, tmp_path, change, complaint):
    pack(dense_folder, tmp_path / "p", lambda module: Int(4, 64))
    config = read_config(tmp_path / "p")
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change)
    write_config(tmp_path / "p", config)
    with pytest.raises(CheckpointError, match=complaint):
        PackedCheckpoint.open(tmp_path / "p")


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_config_blocks_that_say_too_little(dense_folder, pack, tmp_path, format):
    pack(dense_folder, tmp_path / "p", lambda module: Int(4, 64), format=format)
    config = read_config(tmp_path / "p")
    block = {"quant_method": format, "config_groups": [1]}
    (tmp_path / "p" / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        PackedCheckpoint.open(tmp_path / "p")


TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.tensor([1, -2, 3]),
    "c": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
}
ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def write_shards(folder, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None):
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map or placed}))
    return folder


def test_single_file_equals_safetensors(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    assert files.names() == sorted(TENSORS)
    assert files.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert torch.equal(files.tensor(name), tensor)
        assert (files.shape(name), files.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    view = files.tensor("a")
    files.release()
    assert torch.equal(view, TENSORS["a"]), "tensors outlive release"
    assert "a" in files
    assert "z" not in files


def test_shards_and_odd_file_names(tmp_path):
    folder = write_shards(
        tmp_path / "m", {"x-1.safetensors": {"a": TENSORS["a"]}, "x-2.safetensors": {"b": TENSORS["b"]}}
    )
    assert TensorFiles.open(folder).names() == ["a", "b"]
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf" 2 .*{INDEX_FILE}"):
        TensorFiles.open(folder)
    (folder / "x-2.safetensors").unlink()
    assert TensorFiles.open(folder).names() == ["a"]


def test_symlinked_files_open(tmp_path):
    """The hub's cache stores links to blobs outside of the folder."""
    save_file(TENSORS, tmp_path / "blob")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert torch.equal(TensorFiles.open(tmp_path / "m").tensor("a"), TENSORS["a"])


def test_misaligned_tensors_are_copied(tmp_path, raw_safetensors):
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "long": {"dtype": "I64", "shape": [1], "data_offsets": [1, 9]},
    }
    raw_safetensors(tmp_path / "model.safetensors", header, b"\x07" + (5).to_bytes(8, "little"))
    assert TensorFiles.open(tmp_path).tensor("long").tolist() == [5]


def test_side_files_leave_weights_out(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "original").mkdir()
    (tmp_path / ".cache").mkdir()
    kept = ("config.json", "tokenizer.model", "original/params.json", "modeling_x.py")
    dropped = ("pytorch_model.bin", "pytorch_model.bin.index.json", "m.gguf", "original/a.pth", ".cache/x", "x.onnx")
    for name in (*kept, *dropped):
        (tmp_path / name).write_text("x")
    found = {str(file.relative_to(tmp_path)) for file in TensorFiles.open(tmp_path).side_files()}
    assert found == set(kept)


def test_side_files_leave_checkpoints_in_the_folder_out(tmp_path):
    """`compress quantize . --out packed`, twice: neither the first result nor what is being written belongs to it."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "packed").mkdir()
    save_file(TENSORS, tmp_path / "packed" / "model.safetensors")
    for name in ("config.json", "packed/config.json", "packed/notes/a.txt", "other.partial/pieces/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = [str(file.relative_to(tmp_path)) for file in TensorFiles.open(tmp_path).side_files()]
    assert found == ["config.json"]


def test_wrong_paths(tmp_path):
    with pytest.raises(CheckpointError, match="org/name"):
        TensorFiles.open("org/name")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/file ") as caught:
        TensorFiles.open(tmp_path / "file")
    assert caught.value.remedy.endswith(f" {tmp_path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty/model\.safetensors"):
        TensorFiles.open(tmp_path / "empty")


def test_pickle_is_refused_with_the_command(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        TensorFiles.open(tmp_path)


def test_gguf_is_named(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"Name the file itself, .*model\.gguf"):
        TensorFiles.open(tmp_path)


def test_pickle_remedy_works(dense_folder, tmp_path):
    """The command in the message is real: it parses, and what it writes opens."""
    folder = tmp_path / "it's old"
    shutil.copytree(dense_folder, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as refusal:
        TensorFiles.open(folder)
    python, option, code, *_ = shlex.split(refusal.value.remedy.partition("once: ")[2].partition(" and use ")[0])
    assert (python, option) == ("python", "-c")
    convert_model, _, convert_tokenizer = code.partition("; T.")
    exec(convert_model)
    compile(f"T.{convert_tokenizer}", "tokenizer", "exec")
    assert TensorFiles.open(f"{folder}-safetensors").names() == TensorFiles.open(dense_folder).names()


def test_truncated_shard(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"model\.safetensors .*\b{size}\b"):
            TensorFiles.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*\b4 bytes"):
        TensorFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b"{not json", "JSON .*char 1"),
        (b"[1]" + b" " * 5, "JSON object"),
        (b'{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "a": {}}', "twice"),
        ({"a": {**ENTRY, "shape": [5]}}, "4 bytes.*U8.*5"),
        ({"a": {**ENTRY, "dtype": "Q7"}}, "'a' .*'Q7'"),
        ({"a": {**ENTRY, "shape": [-2, -2]}}, r"'a' .*\[-2, -2\]"),
        ({"a": {**ENTRY, "shape": [2.0, 2]}}, r"'a' .*\[2\.0, 2\]"),
        ({"a": {**ENTRY, "shape": "4"}}, r"'a' .*\['4'\]"),
        ({"a": {**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, rf"'a' .*\[0, {2**62}, {2**62}\]"),
        ({"a": {"dtype": "U8"}}, "data_offsets"),
        ({"a": 3}, "data_offsets"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}}, r"'b' .*\b2 .*\b4\)"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [6, 10]}}, r"'b' .*\b6 .*\b4\)"),
        ({"a": {**ENTRY, "shape": [2**62], "data_offsets": [0, 2**62]}}, "truncated"),
    ],
)
def test_lying_headers(tmp_path, raw_safetensors, header, complaint):
    raw_safetensors(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(CheckpointError, match=complaint):
        TensorFiles.open(tmp_path)


@examples(150)
@given(
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), cut=st.integers(0, 9)
)
def test_corrupted_bytes_never_surprise(tmp_path_factory, changes, cut):
    """Whatever bytes are wrong: the file opens and reads, or there is one clear refusal."""
    folder = tmp_path_factory.mktemp("fuzz")
    save_file(TENSORS, folder / "model.safetensors")
    data = bytearray((folder / "model.safetensors").read_bytes())
    for position, value in changes:
        data[position % len(data)] = value
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut] if cut < 3 else data)
    with suppress(CheckpointError):
        files = TensorFiles.open(folder)
        assert all(files.tensor(name).shape == files.shape(name) for name in files)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b.safetensors"])
def test_index_must_stay_in_its_folder(tmp_path, name):
    folder = write_shards(tmp_path / "m", {"x.safetensors": {"a": TENSORS["a"]}}, {"a": name})
    with pytest.raises(CheckpointError, match=re.escape(repr(name))):
        TensorFiles.open(folder)


def test_index_that_does_not_match(tmp_path):
    one = {"x.safetensors": {"a": TENSORS["a"]}}
    with pytest.raises(CheckpointError, match=r"y.safetensors"):
        TensorFiles.open(write_shards(tmp_path / "missing", one, {"a": "y.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'z'.*x.safetensors"):
        TensorFiles.open(write_shards(tmp_path / "absent", one, {"a": "x.safetensors", "z": "x.safetensors"}))
    twice = {"x.safetensors": {"a": TENSORS["a"]}, "y.safetensors": {"a": TENSORS["a"], "b": TENSORS["b"]}}
    with pytest.raises(CheckpointError, match=r"'a' .*x\.safetensors .*y\.safetensors"):
        TensorFiles.open(write_shards(tmp_path / "twice", twice, {"a": "x.safetensors", "b": "y.safetensors"}))
    folder = write_shards(tmp_path / "garbage", one)
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": [1]}'):
        (folder / INDEX_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=INDEX_FILE):
            TensorFiles.open(folder)


def test_config_refusals(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json"):
        read_config(tmp_path)
    for text, complaint in (("{", "JSON: .*char 1"), ("[]", "JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=complaint):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": {"format_version": 2}}))
    with pytest.raises(CheckpointError, match=r"format_version 2.* 1 .*1"):
        read_config(tmp_path)
