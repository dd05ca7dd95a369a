"""GGUF files of every architecture that is read: logits in float64 are those of transformers with the values that the
`gguf` package finds in the file."""

import json

import pytest
import torch
from gguf_models import FAMILIES, VOCAB, quick_first, save_family, write_gguf
from tiny_models import compute_in_float64, load_reference, reference_logits

from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Q4K, Int, Iq4Nl, Q4Minima, Q5Minima
from compress.cpu.binding import library
from runtime.backends.base import Target
from runtime.memory.estimate import embedding_bytes
from runtime.model.embedding import make_embedding
from runtime.model.loader import load_model
from runtime.model.scoring import score

pytest.importorskip("gguf")

TOKENS = torch.randint(4, VOCAB, (1, 48), generator=torch.Generator().manual_seed(0))
KINDS = {
    "ffn_up": "q4_1",
    "ffn_down": "q6_k",
    "ffn_gate": "q4_0",
    "attn_v": "q5_0",
    "token_embd": "q8_0",
    "output": "q3_k",
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mixed(name: str) -> str:
    """A type for every matrix: packed, dequantized and dense ones."""
    return next((kind for part, kind in KINDS.items() if part in name.split(".")), "q4_0")


def expected_logits(folder, values: dict[str, torch.Tensor]) -> torch.Tensor:
    model = load_reference(folder, exact=False)
    model.load_state_dict(values, strict=False)
    model.tie_weights()
    return reference_logits(compute_in_float64(model), TOKENS)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", quick_first(FAMILIES, "llama", "qwen3", "gemma2", "phi3"))
def test_logits_are_those_of_transformers(name, tmp_path):
    folder = save_family(tmp_path / "dense", name)
    values = write_gguf(load_reference(folder, torch.float32), tmp_path / "model.gguf", mixed)
    found = score(load_model(folder_of(tmp_path / "model.gguf"), dtype="float64"), TOKENS)
    assert largest_difference(found, expected_logits(folder, values)) < 1e-12


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_those_of_the_import_of_transformers(name, tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(load_reference(save_family(tmp_path / "dense", name), torch.float32), tmp_path / "model.gguf", mixed)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    found = score(load_model(folder_of(tmp_path / "model.gguf"), dtype="float64"), TOKENS)
    # It takes epsilon from its float32, which is not quite 1e-5.
    assert largest_difference(found, reference_logits(compute_in_float64(theirs.eval()), TOKENS)) < 1e-9


def test_packed_types_are_multiplied_by_packed_kernels(tmp_path):
    write_gguf(load_reference(save_family(tmp_path / "dense", "llama"), torch.float32), tmp_path / "m.gguf", mixed)
    decoder = load_model(folder_of(tmp_path / "m.gguf"), device="cpu", dtype="float32", kernels="reference")
    assert any("o_proj: w4a16 g32 sym" in line for line in decoder.description)
    assert "gguf: 2 tensors of type q4_1 are read as they are" in decoder.description


def test_blocks_are_multiplied_as_they_are(tmp_path):
    """In float32 with the results of plain torch, in little more memory than in the file; embeddings, too."""

    def kind_of(name: str) -> str:
        kinds = {"ffn_down": "q5_k", "attn_k": "q2_k", "attn_q": "q4_1", "attn_v": "q5_1", "ffn_up": "iq4_nl"}
        return next((kind for part, kind in kinds.items() if part in name), "q4_k")

    path = tmp_path / "m.gguf"
    values = write_gguf(load_reference(save_family(tmp_path / "dense", "llama"), torch.float32), path, kind_of)
    decoder = load_model(folder_of(path), device="cpu", dtype="float32")
    plain = load_model(folder_of(path), device="cpu", dtype="float32", kernels="reference")
    if library() is not None:
        lines = "o_proj: w4a16 q4_k, kernel cpu_k", "q_proj: w4a16 q4_1, kernel cpu_k", "iq4_nl, kernel cpu_table"
        for found in lines:
            assert any(found in line for line in decoder.description)
        assert decoder.nbytes < sum(value.numel() for value in values.values())
    assert largest_difference(score(decoder, TOKENS).double(), score(plain, TOKENS).double()) < 1e-4


@pytest.mark.parametrize("scheme", [Q4K(), Q4Minima(), Q5Minima(), Iq4Nl()], ids=str)
def test_rows_of_embeddings_are_looked_up_in_blocks(scheme):
    """Exactly, in the memory that is foreseen."""
    weight = scheme.round(torch.randn(50, 256, generator=torch.Generator().manual_seed(0)))
    target, ids = Target(torch.device("cpu"), torch.bfloat16), torch.tensor([3, 49, 0])
    embedding = make_embedding(weight, target)
    assert torch.equal(embedding(ids), weight.dequantize(torch.bfloat16)[ids])
    assert embedding.nbytes == embedding_bytes(scheme, 50, 256, target)


def test_a_run_leaves_no_blocks_behind(tmp_path):
    """Layers that a recipe leaves out are dense: other engines read no blocks from a folder."""
    from compress.checkpoint.dequantized import open_source, stored_scheme

    path = tmp_path / "m.gguf"
    write_gguf(load_reference(save_family(tmp_path / "dense", "llama"), torch.float32), path, mixed_with_k)
    files, _ = open_source(folder_of(path))
    assert stored_scheme(files, "model.embed_tokens.weight") is None
    assert stored_scheme(files, "model.layers.0.self_attn.o_proj.weight") == Int(4, 32)


def mixed_with_k(name: str) -> str:
    return "q4_k" if "token_embd" in name else "q4_0"


def test_a_run_takes_a_file_as_its_source(tmp_path):
    from compress.checkpoint.dequantized import open_source

    values = write_gguf(
        load_reference(save_family(tmp_path / "dense", "gemma2"), torch.float32), tmp_path / "m.gguf", mixed
    )
    files, config = open_source(folder_of(tmp_path / "m.gguf"))
    assert "quantization_config" not in config
    assert set(files.names()) == set(values)
    for name, value in values.items():
        assert torch.equal(files.tensor(name), value.to(files.dtype(name)))
    assert {file.name for file in files.side_files()} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_commands_take_a_file_for_a_model(tmp_path):
    from compress.checkpoint.weights import Int
    from compress.cli.compress_commands import make_request
    from compress.cli.options import JobOptions
    from compress.recipe import Recipe
    from compress.stages.quantize import QuantizeStage
    from runtime.cli.options import resolve_model

    path = tmp_path / "m.gguf"
    write_gguf(load_reference(save_family(tmp_path / "dense", "llama"), torch.float32), path, mixed)
    folder = folder_of(path)
    assert resolve_model(path) == (folder, str(path))
    request = make_request(path, Recipe((QuantizeStage("rtn", Int(4, 64)),)), tmp_path / "out", JobOptions())
    assert (request.model, request.source) == (folder, str(path.resolve()))


def test_codes_are_exported_as_they_are(tmp_path):
    from compress.checkpoint.writer import export_checkpoint

    write_gguf(
        load_reference(save_family(tmp_path / "dense", "llama"), torch.float32), tmp_path / "m.gguf", lambda _: "q4_0"
    )
    source = PackedCheckpoint.open(folder_of(tmp_path / "m.gguf"))
    written = PackedCheckpoint.open(export_checkpoint(source.path, "gptq", tmp_path / "out"))
    for module in written.modules:
        assert torch.equal(written.packed_weight(module).qweight, source.packed_weight(module).qweight)
        assert torch.equal(written.values(module, torch.float32), source.values(module, torch.float32))
    assert len(written.modules) == 14
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["type"] == "BPE"
