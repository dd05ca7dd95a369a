"""Multimodal models: their text model is compressed, and everything else is copied."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import compress
from tiny_models import compute_in_float64, reference_logits
from tiny_wrappers import WRAPPERS, load_wrapper, save_tiny_wrapper

from compress.checkpoint.expert_files import join_experts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, RecipeError
from compress.evaluate.scorers import load_dequantized
from compress.models.wrappers import LAYOUTS, TIED, TextNames, text_part, whole_config
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

COMPRESSED = sorted(WRAPPERS)
UNREAD = {"qwen3_vl_moe"}
"""Those whose packed experts transformers does not read."""
TOKENS = torch.randint(10, 8000, (2, 40), generator=torch.Generator().manual_seed(3))


def wrapped_model(folder: Path, model_type: str) -> Path:
    save_tiny_wrapper(folder, model_type, torch.bfloat16, vocab_size=8192)
    for file in demo_model_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("gemma3", "awq"),
        *(pytest.param(kind, method, marks=pytest.mark.full) for kind in COMPRESSED for method in ("gptq", "rtn")),
    ],
)
def test_packed_text_models_load_as_they_were_published(tmp_path: Path, model_type: str, method: str) -> None:
    source, out = wrapped_model(tmp_path / "source", model_type), tmp_path / "packed"
    result = compress(source, out, QuantizeStage(method, Int(4, 16)))
    assert result.structure.ok
    stored, before = TensorFiles.open(out), TensorFiles.open(source)
    others = sorted(PackedCheckpoint.open(source).files.other_parts)
    assert others
    assert all("vi" in name or "projector" in name or name.endswith("image_newline") for name in others)
    assert all(torch.equal(stored.tensor(name), before.tensor(name)) for name in others)
    notes = result.report["plan"]["notes"]
    assert any(note.startswith(f"{len(others)} tensors") for note in notes)
    packed, loaded = PackedCheckpoint.open(out), load_wrapper(out, torch.bfloat16)
    names = TextNames.find((name for name, _ in loaded.named_parameters()), LAYOUTS)
    with torch.no_grad():
        assert loaded(TOKENS).logits.isfinite().all()
    singles = {f"{module}.weight": packed.weight(module).dequantize(torch.bfloat16) for module in packed.modules}
    parameters = dict(loaded.named_parameters())
    joined = join_experts(singles, packed.config)
    # transformers joins the experts of some models when it loads them.
    served = joined if all(names.stored(name) in parameters for name in joined) else singles
    for name, tensor in served.items() if model_type not in UNREAD else ():
        assert torch.equal(loaded_parameter(parameters, names.stored(name)), tensor), name
    reference = compute_in_float64(load_wrapper(source, torch.float64))
    state = {f"{module}.weight": packed.weight(module).dequantize(torch.float64) for module in packed.modules}
    state |= {name: packed.tensor(name) for name in packed.dense_names()}
    state = join_experts(state, packed.config)
    for name, parameter in reference.named_parameters():
        own = names.own(name)
        if own != name or own.startswith("lm_head"):
            value = (state[own] if own in state else joined_experts(state, own, len(parameter))).double()
            parameter.data = value if value.shape == parameter.shape else value.mT
    expected = reference_logits(reference, TOKENS)
    torch.testing.assert_close(score(load_model(out, dtype="float64"), TOKENS), expected, rtol=0, atol=1e-9)
    found = reference_logits(load_dequantized(out, dtype="float32"), TOKENS)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.01 * expected.std().item())


def loaded_parameter(parameters: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The parameter of transformers, or its slice for an expert that files hold alone."""
    if name in parameters:
        return parameters[name]
    owner, _, inside = name.partition(".experts.")
    index, part, _ = inside.split(".")
    if part == "down_proj":
        return parameters[f"{owner}.experts.down_proj"][int(index)]
    gate, up = parameters[f"{owner}.experts.gate_up_proj"][int(index)].chunk(2)
    return gate if part == "gate_proj" else up


def joined_experts(tensors: dict[str, torch.Tensor], name: str, count: int) -> torch.Tensor:
    """A parameter of transformers with the same part of all experts."""
    owner, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    return torch.stack(
        [torch.cat([tensors[f"{owner}.{index}.{part}.weight"] for part in parts]) for index in range(count)]
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model with two schemes, a dense linear and a head of its own."""
    folder = tmp_path_factory.mktemp("mixed")
    source = wrapped_model(folder / "source", "qwen3_vl")
    eight = QuantizeStage("rtn", Int(8, 32), targets=("*.o_proj", "lm_head"))
    four = QuantizeStage("rtn", Int(4, 32), targets=("*layers.0.mlp.*_proj", "*.[qkv]_proj"))
    compress(source, folder / "packed", eight, four)
    return folder / "packed"


def test_modules_of_several_schemes_are_found_by_their_patterns(mixed: Path) -> None:
    packed, loaded = PackedCheckpoint.open(mixed), load_wrapper(mixed, torch.bfloat16)
    assert set(packed.schemes.values()) == {Int(4, 32), Int(8, 32)}
    names = TextNames("model.language_model", "lm_head")
    with torch.no_grad():
        loaded(TOKENS)
    for module in packed.modules:
        expected = packed.weight(module).dequantize(torch.bfloat16)
        assert torch.equal(loaded.get_submodule(names.stored(module)).weight, expected), module
    report = verify_structure(mixed)
    assert report.ok
    reasons = {row.name: row.reason for row in report.dense}
    assert reasons["model.visual.patch_embed.proj.bias"] not in (reasons["model.norm.weight"], "norm or bias")


def test_packing_may_be_described_in_the_config_of_the_text_model(mixed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mixed, tmp_path / "nested"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert PackedCheckpoint.open(folder).schemes == PackedCheckpoint.open(mixed).schemes


def test_what_the_text_model_says_of_its_packing_is_replaced_by_what_was_done(tmp_path: Path) -> None:
    source = wrapped_model(tmp_path / "source", "gemma3")
    published = json.loads((source / "config.json").read_text())
    published["text_config"]["quantization_config"] = {"format": "pack-quantized"}
    assert text_part(published)["quantization_config"] == {"format": "pack-quantized"}
    assert whole_config(text_part(published)) == published
    whole = whole_config(text_part(published) | {"quantization_config": {"format": "int-quantized"}})
    assert whole["quantization_config"] == {"format": "int-quantized"}
    assert "quantization_config" not in whole["text_config"]


def test_a_head_that_is_no_longer_tied_is_so_for_every_reader(tmp_path: Path) -> None:
    source = wrapped_model(tmp_path / "source", "gemma3")
    before = json.loads((source / "config.json").read_text())
    assert whole_config(text_part(before)) == before
    untied = whole_config(text_part(before) | {"tie_word_embeddings": False})
    assert [untied[TIED], untied["text_config"][TIED], untied["vision_config"]] == [
        False,
        False,
        before["vision_config"],
    ]


def test_exports(mixed: Path, tmp_path: Path) -> None:
    dense = export_checkpoint(mixed, "dense", tmp_path / "dense")
    logits = load_wrapper(dense, torch.float32)(TOKENS).logits
    torch.testing.assert_close(score(load_model(dense, dtype="float32"), TOKENS), logits, rtol=0, atol=1e-3)
    with pytest.raises(CheckpointError, match="compressed-tensors"):
        export_checkpoint(mixed, "gptq", tmp_path / "gptq")


def test_a_rotation_is_refused_as_images_would_not_turn_with_it(tmp_path: Path) -> None:
    source = wrapped_model(tmp_path / "source", "mistral3")
    with pytest.raises(RecipeError, match="rotate"):
        compress(source, tmp_path / "out", RotateStage(), QuantizeStage("rtn", Int(4, 32)))
