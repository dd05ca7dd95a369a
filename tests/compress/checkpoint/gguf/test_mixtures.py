"""Mixtures written as GGUF: `gguf` finds each expert in its stack, and reading back gives the same codes and logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import VOCAB, add_metadata, encode, quick_first, tokenizer_metadata
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.tensors import open_gguf
from compress.checkpoint.gguf.tokenizer import tokenizer_files
from compress.checkpoint.gguf.writer import NewTensor, write_gguf
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Q4K, Int
from compress.common.cli import bundled_path
from compress.common.errors import ToolkitError
from runtime.model.loader import load_model
from runtime.model.scoring import score

gguf = pytest.importorskip("gguf")

EXPERTS = 12
"""More than ten: in the order of names, expert 10 is before expert 2."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
TOKENS = torch.randint(4, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
EACH = quick_first(FAMILIES, "mixtral", "qwen2_moe")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_tokenizer(folder: Path) -> Path:
    for name, text in tokenizer_files(tokenizer_metadata(), VOCAB).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def save(folder: Path, name: str, **options: object) -> Path:
    return with_tokenizer(save_tiny_model(folder, name, **(SIZES | FAMILIES[name] | options)))


def logits(path: Path) -> torch.Tensor:
    return score(load_model(folder_of(path), dtype="float64"), TOKENS)


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("name", EACH)
def test_gguf_finds_each_expert_in_its_stack(name, tmp_path):
    dense = save(tmp_path / "dense", name)
    export_gguf(dense, tmp_path / "m.gguf")
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == ARCHITECTURES[name])
    places, source = gguf.get_tensor_name_map(number, 2), PackedCheckpoint.open(dense)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    mixtures = [each for each in source.files if ".mlp." in each or ".block_sparse_moe." in each]
    assert len(mixtures) >= 2 * (3 * EXPERTS + 1)
    for each in mixtures:
        before, _, after = each.partition(".experts.")
        expert, _, part = after.partition(".")
        data = stored[places.get_name(f"{before}.experts.{part}" if part else each, try_suffixes=(".weight",))]
        found = torch.from_numpy((data[int(expert)] if part else data).copy())
        assert torch.equal(found, source.tensor(each))
    assert (logits(tmp_path / "m.gguf") - logits(dense)).abs().max() < 1e-12


@pytest.mark.parametrize("name", quick_first(["qwen2_moe", "qwen3_moe"], "qwen2_moe"))
def test_codes_of_experts_survive(name, tmp_path):
    pack_model(
        save(tmp_path / "dense", name), tmp_path / "packed", lambda module: Int(4 if is_expert(module) else 8, 32)
    )
    exported = export_gguf(with_tokenizer(tmp_path / "packed"), tmp_path / "m.gguf", embedding="f32")
    assert exported.types["q4_0", "codes as they are"] == 6
    source, found = PackedCheckpoint.open(tmp_path / "packed"), PackedCheckpoint.open(folder_of(tmp_path / "m.gguf"))
    assert found.modules == source.modules
    assert sum(map(is_expert, found.modules)) == 2 * 3 * EXPERTS
    for module in source.modules:
        assert torch.equal(found.packed_weight(module).qweight, source.packed_weight(module).qweight)
        assert found.shape(module) == source.shape(module)
        assert found.weight_bytes(module) == found.files.tensor(f"{module}.gguf_blocks").numel()
    assert (logits(tmp_path / "m.gguf") - logits(tmp_path / "packed")).abs().max() < 1e-12


def test_routers_stay_dense_when_experts_are_rounded(tmp_path):
    export_gguf(save(tmp_path / "dense", "qwen2_moe"), tmp_path / "m.gguf", "q4_1")
    types = {name: tensor.type.name for name, tensor in GGUFFile.open(tmp_path / "m.gguf").tensors.items()}
    layer = {name.removeprefix("blk.1.").removesuffix(".weight"): kind for name, kind in types.items()}
    assert (layer["ffn_gate_inp"], layer["ffn_gate_inp_shexp"]) == ("f32", "f32")
    assert {layer[f"ffn_{part}_exps"] for part in ("gate", "up", "down")} == {"q4_1"}
    assert layer["ffn_up_shexp"] == "q4_1"
    file, found = GGUFFile.open(tmp_path / "m.gguf"), PackedCheckpoint.open(folder_of(tmp_path / "m.gguf"))
    values = file.values("blk.1.ffn_up_exps.weight")
    assert torch.equal(found.values("model.layers.1.mlp.experts.11.up_proj", torch.float32), values[11])


def rewrite(source: Path, out: Path, change_shape: dict[str, tuple[int, ...]], **changes: object) -> Path:
    """Writes a file again with other shapes and metadata."""
    file = GGUFFile.open(source)
    tensors = [
        NewTensor(name, each.type, change_shape.get(name, each.shape), lambda name=name: file.blocks(name))
        for name, each in file.tensors.items()
    ]
    write_gguf(out, {**file.metadata, **changes}, tensors)
    return out


def test_a_shared_gate_may_be_a_vector(tmp_path):
    export_gguf(save(tmp_path / "dense", "qwen2_moe"), tmp_path / "m.gguf")
    vectors = {f"blk.{layer}.ffn_gate_inp_shexp.weight": (64,) for layer in (0, 1)}
    rewrite(tmp_path / "m.gguf", tmp_path / "v.gguf", vectors)
    assert torch.equal(logits(tmp_path / "v.gguf"), logits(tmp_path / "m.gguf"))


def test_stacks_of_other_numbers_are_refused(tmp_path):
    export_gguf(save(tmp_path / "dense", "mixtral"), tmp_path / "m.gguf")
    rewrite(tmp_path / "m.gguf", tmp_path / "n.gguf", {}, **{"llama.expert_count": 11})
    with pytest.raises(ToolkitError, match=r"shape \[12, 96, 64\], and metadata say 11 experts"):
        folder_of(tmp_path / "n.gguf")
    flat = {"blk.0.ffn_gate_exps.weight": (EXPERTS * 96, 64)}
    with pytest.raises(ToolkitError, match=r"shape \[1152, 64\], and metadata say 12 experts"):
        folder_of(rewrite(tmp_path / "m.gguf", tmp_path / "f.gguf", flat))


REFUSED = {
    "weights": ("qwen3_moe", {"norm_topk_prob": False}, "cannot say"),
    "dense layers": ("qwen2_moe", {"mlp_only_layers": [0]}, "has no place in GGUF files of 'qwen2moe'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mixtures_that_gguf_cannot_say_are_refused(case, tmp_path):
    name, options, reason = REFUSED[case]
    with pytest.raises(ToolkitError, match=reason):
        export_gguf(save(tmp_path / "dense", name, **options), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_experts_of_several_types_are_refused(tmp_path):
    wide = "experts.7."
    pack_model(
        save(tmp_path / "dense", "qwen3_moe"), tmp_path / "packed", lambda module: Int(8 if wide in module else 4, 32)
    )
    with pytest.raises(ToolkitError, match="all experts in one type, and theirs are q4_0 and q8_0"):
        export_gguf(with_tokenizer(tmp_path / "packed"), tmp_path / "m.gguf")


@pytest.mark.full
def test_the_packaged_mixture_keeps_its_logits(tmp_path):
    source = bundled_path("demo-mixture")
    export_gguf(source, tmp_path / "m.gguf")
    assert torch.equal(logits(tmp_path / "m.gguf"), logits(source))


def test_experts_of_a_k_type_are_read_as_they_are(tmp_path):
    """Each with the blocks of its place in the stack; products in float32 are those of plain torch."""
    dense = save(tmp_path / "dense", "mixtral", hidden_size=256, intermediate_size=256, head_dim=64)
    export_gguf(dense, tmp_path / "m.gguf", "q4_k")
    packed = PackedCheckpoint.open(folder_of(tmp_path / "m.gguf"))
    module = next(module for module in packed.modules if "experts.11." in module)
    assert packed.scheme(module) == Q4K()
    expert = packed.packed_weight(module).dequantize()
    assert (expert - PackedCheckpoint.open(dense).tensor(f"{module}.weight")).norm() < 0.1 * expert.norm()
    found, plain = (
        score(load_model(packed.path, device="cpu", dtype="float32", kernels=kernels), TOKENS).double()
        for kernels in ("auto", "reference")
    )
    assert (found - plain).abs().max() < 1e-4 * plain.abs().max()


GATE, UP, MERGED = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "gate_up"))


def write_experts(source: Path, out: Path, kind: str, is_merged: bool) -> Path:
    """Writes a file of float32 numbers again by the `gguf` package, with experts of a type."""
    reader, file = gguf.GGUFReader(source), GGUFFile.open(source)
    number = gguf.GGMLQuantizationType[kind.upper()]
    writer = gguf.GGUFWriter(out, file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if key != "general.architecture":
            add_metadata(writer, key, value)
    stacks = {}
    for tensor in reader.tensors:
        values = np.array(tensor.data, dtype=np.float32)
        if "_exps" in tensor.name:
            encoded = encode(values.reshape(-1, values.shape[-1]), number, gguf)
            stacks[tensor.name] = encoded.reshape(*values.shape[:2], -1)
        else:
            writer.add_tensor(tensor.name, values)
    for name, data in stacks.items():
        if is_merged and name.endswith(UP):
            continue
        if is_merged and name.endswith(GATE):
            # Rows of gate and then of up, expert by expert, as llama.cpp's converter joins them.
            name, data = name.replace(GATE, MERGED), np.concatenate([data, stacks[name.replace(GATE, UP)]], axis=1)
        writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.full
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_1", "q4_k", "tq2_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_gate_and_up_in_one_tensor_are_those_of_two(name: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit, of types that are kept and of one that is dequantized."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    sizes |= {} if name == "mixtral" else {"moe_intermediate_size": 256}
    export_gguf(save(tmp_path / "dense", name, **sizes), tmp_path / "m.gguf")
    paths = [
        write_experts(tmp_path / "m.gguf", tmp_path / f"{is_merged}.gguf", kind, is_merged)
        for is_merged in (False, True)
    ]
    assert [sum(MERGED in each for each in GGUFFile.open(path).tensors) for path in paths] == [0, 2]
    two, one = map(open_gguf, paths)
    assert one.entries.keys() == two.entries.keys()
    assert sum(map(is_expert, one.entries)) == 2 * 3 * EXPERTS
    for each, entry in two.entries.items():
        found = one.entries[each]
        assert torch.equal(one.tensor(each), two.tensor(each))
        assert (found.dtype, found.shape, found.nbytes) == (entry.dtype, entry.shape, entry.nbytes)
    assert torch.equal(logits(paths[1]), logits(paths[0]))


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    export_gguf(save(tmp_path / "dense", "mixtral"), tmp_path / "m.gguf")
    return write_experts(tmp_path / "m.gguf", tmp_path / "merged.gguf", "f32", is_merged=True)


@pytest.mark.full
def test_gate_in_two_tensors_is_refused(merged: Path, tmp_path: Path) -> None:
    file = GGUFFile.open(merged)
    tensors = [
        NewTensor(name, each.type, each.shape, lambda name=name: file.blocks(name))
        for name, each in file.tensors.items()
    ]
    kind, shape = file.tensors["blk.1." + MERGED].type, (EXPERTS, 96, 64)
    tensors.append(NewTensor("blk.1." + GATE, kind, shape, lambda: torch.zeros(shape)))
    write_gguf(tmp_path / "twice.gguf", file.metadata, tensors)
    with pytest.raises(ToolkitError, match=r"both hold 'model\.layers\.1\..*experts\.0\.w1\.weight'"):
        folder_of(tmp_path / "twice.gguf")


@pytest.mark.full
def test_halves_must_be_whole_rows(merged: Path, tmp_path: Path) -> None:
    odd = {"blk.0." + MERGED: (EXPERTS, 3, 4096)}
    with pytest.raises(ToolkitError, match=r"shape \[12, 3, 4096\] and no two equal halves"):
        folder_of(rewrite(merged, tmp_path / "odd.gguf", odd))
