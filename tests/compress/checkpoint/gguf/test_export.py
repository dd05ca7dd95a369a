"""Checkpoints written as GGUF: `gguf` reads their values, transformers loads them, and reading back gives the same
codes, tokens and logits."""

import json
from pathlib import Path

import pytest
import torch
from gguf_models import FAMILIES, VOCAB, quick_first, save_family, tokenizer_metadata
from tiny_models import compute_in_float64, pack_model, reference_logits

from compress.checkpoint.gguf import tokenizer_metadata as inverse
from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.gguf.mixes import FLOATS, MIXES
from compress.checkpoint.gguf.tokenizer import tokenizer_files
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from runtime.model.loader import load_model
from runtime.model.scoring import score
from runtime.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

TOKENS = torch.randint(4, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_tokenizer(folder: Path) -> Path:
    for name, text in tokenizer_files(tokenizer_metadata(), VOCAB).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def save(folder: Path, name: str = "llama") -> Path:
    return with_tokenizer(save_family(folder, name))


def logits(path: Path) -> torch.Tensor:
    return score(load_model(folder_of(path), dtype="float64"), TOKENS)


def check_with_gguf(path: Path) -> None:
    """Compares what is read here with what `gguf` reads, tensor for tensor."""
    file = GGUFFile.open(path)
    for stored in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        assert torch.equal(file.values(stored.name), values.view(file.tensors[stored.name].shape))


@pytest.mark.parametrize("name", quick_first(FAMILIES, "llama", "gemma3_text"))
def test_codes_and_logits_survive(name, tmp_path):
    dense = save(tmp_path / "dense", name)
    scheme = {True: Int(8, 32), False: Int(4, 64)}
    pack_model(dense, tmp_path / "packed", lambda module: scheme["down" in module])
    with_tokenizer(tmp_path / "packed")
    exported = export_gguf(tmp_path / "packed", tmp_path / "m.gguf", embedding="f32")
    assert {how for (kind, how) in exported.types if kind.startswith("q")} == {"codes as they are"}
    check_with_gguf(tmp_path / "m.gguf")
    source, found = PackedCheckpoint.open(tmp_path / "packed"), PackedCheckpoint.open(folder_of(tmp_path / "m.gguf"))
    assert found.modules == source.modules
    for module in source.modules:
        assert torch.equal(found.packed_weight(module).qweight, source.packed_weight(module).qweight)
    exact = logits(tmp_path / "packed")
    difference = (logits(tmp_path / "m.gguf") - exact).abs().max() / exact.abs().max()
    assert difference < 1e-6 if name.startswith("gemma") else difference < 1e-12  # 1 + weight is float32 in files


@pytest.mark.parametrize("mix", quick_first(MIXES, "q4_0", "q4_k_m"))
def test_dense_matrices_are_rounded(mix, tmp_path):
    dense, base = save(tmp_path / "dense"), MIXES[mix].base
    export_gguf(dense, tmp_path / "m.gguf", mix)
    check_with_gguf(tmp_path / "m.gguf")
    file = GGUFFile.open(tmp_path / "m.gguf")
    assert file.tensors["blk.0.ffn_up.weight"].type.name == base
    assert file.tensors["token_embd.weight"].type.name == (base if base in ("q8_0", *FLOATS) else "q6_k")
    assert file.metadata["general.file_type"] == gguf.LlamaFileType[file_type_name(mix)]
    values, source = PackedCheckpoint.open(folder_of(tmp_path / "m.gguf")), PackedCheckpoint.open(dense)
    module = "model.layers.1.self_attn.q_proj"
    found = values.values(module, torch.float32) if module in values.schemes else values.tensor(f"{module}.weight")
    exact = source.tensor(f"{module}.weight").float()
    assert (found - exact).norm() < 0.3 * exact.norm()


def file_type_name(mix: str) -> str:
    """Returns the name of a mix in the `gguf` package."""
    return {"f32": "ALL_F32"}.get(mix, f"MOSTLY_{mix.upper()}")


def test_the_embedding_gets_the_type_of_the_mix_or_the_wanted_one(tmp_path):
    pack_model(with_tokenizer(save_family(tmp_path / "dense", "llama 3")), tmp_path / "packed", lambda _: Int(4, 32))
    with_tokenizer(tmp_path / "packed")

    def ends(name: str, **options) -> tuple[str, str, int]:
        file = GGUFFile.open(export_gguf(tmp_path / "packed", tmp_path / name, **options).path)
        kinds = (file.tensors[f"{end}.weight"].type.name for end in ("token_embd", "output"))
        return *kinds, file.metadata["general.file_type"]

    assert ends("usual.gguf") == ("q4_0", "q6_k", gguf.LlamaFileType.MOSTLY_Q4_0)
    assert ends("wanted.gguf", embedding="bf16") == ("bf16", "bf16", gguf.LlamaFileType.MOSTLY_Q4_0)
    assert ends("mix.gguf", mix="q5_k_m") == ("q5_k", "q6_k", gguf.LlamaFileType.MOSTLY_Q4_0)
    with pytest.raises(ToolkitError, match="q6_k"):
        export_gguf(tmp_path / "packed", tmp_path / "m.gguf", embedding="q6")


def test_floats_that_overflow_are_refused(tmp_path):
    dense = save(tmp_path / "dense")
    change_tensor(dense, "model.norm.weight", 1e30)
    export_gguf(dense, tmp_path / "norm.gguf", "f16")  # norms stay float32
    change_tensor(dense, "model.layers.0.mlp.up_proj.weight", 1e30)
    with pytest.raises(ToolkitError, match="f16"):
        export_gguf(dense, tmp_path / "m.gguf", "f16")


def change_tensor(folder: Path, name: str, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.full
@pytest.mark.parametrize("mix", ["q4_0", "q4_k_m"])
def test_one_command_chooses_codes_by_a_method(mix, tmp_path):
    from typer.testing import CliRunner

    from compress.cli import app

    out, rounded = tmp_path / "m.gguf", export_gguf(demo_model_path(), tmp_path / "rounded.gguf", mix).path
    command = ["export", "demo", "--format", "gguf", "--gguf-type", mix, "--method", "gptq", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--num-calibration-samples", "4", "--max-seq-length", "64"])
    assert result.exit_code == 0, result.output
    found, expected = GGUFFile.open(out), GGUFFile.open(rounded)
    assert {name: each.type.name for name, each in found.tensors.items()} == {
        name: each.type.name for name, each in expected.tensors.items()
    }
    assert found.metadata["general.file_type"] == expected.metadata["general.file_type"] == MIXES[mix].number
    assert not torch.equal(found.values("blk.0.attn_q.weight"), expected.values("blk.0.attn_q.weight"))
    assert torch.equal(found.values("token_embd.weight"), expected.values("token_embd.weight"))
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"m.gguf", "rounded.gguf"}


MISUSED = {
    "text without a method": (["--format", "gguf", "--seed", "1"], "--method gptq"),
    "codes without a type": (["--format", "gguf", "--method", "gptq"], "--gguf-type"),
    "codes of floats": (["--format", "gguf", "--method", "gptq", "--gguf-type", "bf16"], "--gguf-type"),
    "another format": (["--format", "dense", "--embedding-type", "q6_k"], "--format gguf"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_options_without_effect_are_refused(case, tmp_path):
    from typer.testing import CliRunner

    from compress.cli import app

    options, remedy = MISUSED[case]
    result = CliRunner().invoke(app, ["export", "demo", *options, "--out", str(tmp_path / "m.gguf")])
    assert remedy in result.exception.remedy
    assert not list(tmp_path.glob("m*"))


def test_rows_that_are_no_whole_blocks_get_a_smaller_block(tmp_path):
    dense = with_tokenizer(save_family_of_width(tmp_path / "dense", 96))
    export_gguf(dense, tmp_path / "m.gguf", "q4_k")
    types = {tensor.type.name for tensor in GGUFFile.open(tmp_path / "m.gguf").tensors.values()}
    assert types == {"q5_0", "q8_0", "q4_k", "q6_k", "f32"}  # of rows of 96 and 512, the more bits in layer 1


def save_family_of_width(folder: Path, width: int) -> Path:
    from gguf_models import SIZES
    from tiny_models import save_tiny_model

    return save_tiny_model(folder, "llama", **(SIZES | {"hidden_size": width, "head_dim": 24}))


def test_without_a_type_dense_matrices_stay_dense(tmp_path):
    dense = save(tmp_path / "dense", "phi3")
    assert list(export_gguf(dense, tmp_path / "m.gguf").lines()) == ["10 x f32: dense"]
    assert (logits(tmp_path / "m.gguf") - logits(dense)).abs().max() < 1e-12


def test_transformers_loads_what_is_written(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pack_model(save(tmp_path / "dense"), tmp_path / "packed", lambda module: Int(4, 32))
    with_tokenizer(tmp_path / "packed")
    export_gguf(tmp_path / "packed", tmp_path / "m.gguf", embedding="f32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    expected = reference_logits(compute_in_float64(theirs), TOKENS)
    assert (logits(tmp_path / "packed") - expected).abs().max() < 1e-8  # epsilon of its float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "the thing <|im_start|> on in größe"
    ids = Tokenizer.open(tmp_path / "packed").encode(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def test_the_demo_model_keeps_its_tokenizer_and_logits(tmp_path):
    from typer.testing import CliRunner

    from compress.cli import app

    result = CliRunner().invoke(app, ["export", "demo", "--format", "gguf", "--out", str(tmp_path / "m.gguf")])
    assert result.exit_code == 0, result.output
    assert "43 x bf16: dense" in result.output
    ours, source = Tokenizer.open(folder_of(tmp_path / "m.gguf")), Tokenizer.open(demo_model_path())
    assert ours.count_differences(source) == 0
    assert ours.chat_template == source.chat_template
    assert ours.special_tokens == source.special_tokens
    text = "It's 12345 o'clock<|im_end|>\n  größe 漢字"
    assert ours.encode(text) == source.encode(text)
    generation = json.loads((folder_of(tmp_path / "m.gguf") / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]
    assert torch.equal(logits(tmp_path / "m.gguf"), logits(demo_model_path()))


def test_tokenizer_data_survive_both_ways(tmp_path):
    metadata = tokenizer_metadata() | {"tokenizer.ggml.add_bos_token": True}
    for name, text in tokenizer_files(metadata, VOCAB).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = inverse.tokenizer_metadata(tmp_path, VOCAB)
    assert metadata.items() <= found.items()
    more = inverse.tokenizer_metadata(tmp_path, VOCAB + 2)
    assert more["tokenizer.ggml.tokens"][VOCAB:] == [f"[PAD{VOCAB}]", f"[PAD{VOCAB + 1}]"]
    assert more["tokenizer.ggml.token_type"][VOCAB:] == [5, 5]


def test_sentencepiece_data_survive_both_ways(tmp_path):
    letters = [chr(97 + place) for place in range(26)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters, "th", "\u2581th"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 29],
        "tokenizer.ggml.scores": [*[-1e6] * 286, -0.0, -1.0],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for name, text in tokenizer_files(metadata, 288).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert metadata.items() <= inverse.tokenizer_metadata(tmp_path, 288).items()


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tokenizer(folder: Path, **changes) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(stored | changes))


REFUSED = {
    "model type": (lambda folder: change_config(folder, model_type="olmo2"), None, "'olmo2' are not written as GGUF"),
    "rope": (
        lambda folder: change_config(
            folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        None,
        "cannot say",
    ),
    "setting": (lambda folder: change_config(folder, hidden_act="gelu"), None, "cannot say"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), None, "has no tokenizer.json"),
    "unigram": (lambda folder: change_tokenizer(folder, model={"type": "Unigram"}), None, "type 'Unigram'"),
    "words": (lambda folder: change_tokenizer(folder, pre_tokenizer=None), None, "none that GGUF names"),
    "rows": (
        lambda folder: change_tokenizer(folder, added_tokens=[{"id": 999, "content": "x"}]),
        None,
        "token id 999, and the embedding has 264 rows",
    ),
    "type": (lambda folder: None, "q9_9", "unknown GGUF type 'q9_9'.*q4_k_m"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_nothing(case, tmp_path):
    change, kind, reason = REFUSED[case]
    folder = save(tmp_path / "dense")
    change(folder)
    with pytest.raises(ToolkitError, match=reason) as refusal:
        export_gguf(folder, tmp_path / "m.gguf", kind)
    assert refusal.value.remedy
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["dense"]


def test_codes_without_a_type_name_the_nearest(tmp_path):
    pack_model(save(tmp_path / "dense"), tmp_path / "packed", lambda module: Int(3, 16))
    with_tokenizer(tmp_path / "packed")
    with pytest.raises(ToolkitError, match=r"w3a16 g16 sym.*--gguf-type q3_k"):
        export_gguf(tmp_path / "packed", tmp_path / "m.gguf")
    lines = list(export_gguf(tmp_path / "packed", tmp_path / "m.gguf", "q3_k").lines())
    assert lines == ["8 x q3_k: rounded", "4 x q4_k: rounded", "2 x q5_k: rounded", "1 x q6_k: rounded"]
    with pytest.raises(ToolkitError, match="exists already"):
        export_gguf(tmp_path / "packed", tmp_path / "m.gguf", "q3_k")
