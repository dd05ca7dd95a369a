"""EXL3 of layers whose sides are not multiples of 128, which exllamav3 stores with zeros around them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from folders import private_copy
from runs import compress
from safetensors.torch import load_file, save_file
from shared_store import SharedStore
from tiny_configs import VARIANTS
from tiny_models import load_reference, random_weight, reference_logits, save_tiny_model
from torch import Tensor

from compress.checkpoint.expert_files import join_experts, split_experts
from compress.checkpoint.reader import PackedCheckpoint, open_stored
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Exl3, Int
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.exl3 import Exl3Weight, decode_tiles
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import SchemeError
from compress.cpu.binding import absence, library
from compress.stages.quantize import QuantizeStage
from runtime.backends.base import Target
from runtime.backends.cpu.trellis import TRELLIS, CpuTrellisLinear
from runtime.model import loader
from runtime.model.loader import load_model
from runtime.model.prepare import prepare_model
from runtime.model.scoring import score

CODEBOOKS = ("3inst", "mcg", "mul1")
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(5))
SIZES = {"hidden_size": 192, "intermediate_size": 320, "vocab_size": 8200, "attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gpt_oss": {**VARIANTS["gpt_oss"], "hidden_size": 160, "intermediate_size": 176, "vocab_size": 8200},
}


@dataclass(frozen=True)
class Published:
    """A checkpoint as exllamav3 writes it, and a dense one of the same values, made without this toolkit's reader."""

    packed: Path
    dense: Path


@pytest.fixture(scope="session", params=MODELS)
def published(request: pytest.FixtureRequest, shared_store: SharedStore) -> Published:
    def write(folder: Path) -> None:
        packed = save_tiny_model(folder / "packed", request.param, torch.float16, **MODELS[request.param])
        files = split_experts(*open_stored(packed))
        stored = {name: files.tensor(name).clone() for name in files.names()}
        stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
        dense = dict(stored)
        modules = [name.removesuffix(".weight") for name in stored if name.endswith(("_proj.weight", "lm_head.weight"))]
        matrices = list(dict.fromkeys(map(without_expert, modules)))
        for count, module in enumerate(modules):
            shape, kind = tuple(stored.pop(f"{module}.weight").shape), matrices.index(without_expert(module))
            scheme = Exl3(6 if module == "lm_head" else 2 + kind % 4, CODEBOOKS[kind % 3])
            tensors, dense[f"{module}.weight"] = padded_layer(shape, scheme, count)
            if f"{module}.bias" in stored:
                tensors[".bias"] = stored[f"{module}.bias"].new_full((rounded_up(shape[0]),), 7.0)
                tensors[".bias"][: shape[0]] = stored[f"{module}.bias"]
            stored |= {module + suffix: tensor for suffix, tensor in tensors.items()}
        save_file(stored, packed / "model.safetensors")
        for file in demo_model_path().glob("tokenizer*"):
            (packed / file.name).write_bytes(file.read_bytes())
        config = json.loads((packed / "config.json").read_text())
        save_dense(folder / "dense", config, dense)
        block = {"quant_method": "exl3", "version": "0.0.4", "bits": 3.5, "head_bits": 6, "codebook": "mul1"}
        (packed / "config.json").write_text(json.dumps(config | {"quantization_config": block}))

    folder = shared_store.folder("exl3_padding", request.param, write)
    return Published(folder / "packed", folder / "dense")


def without_expert(module: str) -> str:
    """A name that all experts of a layer share, which have one width and codebook there."""
    return re.sub(r"experts\.\d+", "experts", module)


def rounded_up(size: int) -> int:
    return -(-size // 128) * 128


def padded_layer(shape: tuple[int, int], scheme: Exl3, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a padded layer, and the values that it stands for: turned by explicit matrices, then cut."""
    rows, columns = map(rounded_up, shape)
    weight = random_weight((rows, columns), scheme, seed)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
    left, right = (torch.block_diag(*[signs] * (size // 128)) for size in (columns, rows))
    turned = left @ decode_tiles(weight.trellis, scheme).double() @ right
    values = (weight.suh.double()[:, None] * turned * weight.svh.double()).T / 128
    return weight.tensors(torch.float16), values[: shape[0], : shape[1]].contiguous()


def save_dense(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Saves values in float64, which are those that the codes stand for without rounding."""
    folder.mkdir()
    stacked = join_experts({name: tensor.double() for name, tensor in tensors.items()}, config)
    save_file({name: tensor.contiguous() for name, tensor in stacked.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "dtype": "float64"}))


def expected_logits(published: Published) -> Tensor:
    return reference_logits(load_reference(published.dense), TOKENS)


def test_sides_are_those_of_config_json(published: Published) -> None:
    packed = PackedCheckpoint.open(published.packed)
    hidden, vocabulary = packed.config["hidden_size"], packed.config["vocab_size"]
    assert packed.shape("lm_head") == packed.packed_weight("lm_head").shape == (vocabulary, hidden)
    assert packed.files.shape("lm_head.trellis") == (rounded_up(hidden) // 16, rounded_up(vocabulary) // 16, 96)
    assert verify_structure(published.packed).problems == ()


def test_it_is_served(published: Published) -> None:
    decoder = load_model(published.packed, dtype="float64")
    torch.testing.assert_close(score(decoder, TOKENS), expected_logits(published), rtol=0, atol=1e-9)


@pytest.mark.skipif(library() is None, reason=absence())
def test_packed_codes_are_multiplied_and_prepared(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "available_bytes", lambda device: 10_000)
    model = private_copy(published.packed, tmp_path / "model")
    decoder = load_model(model, dtype="float32")
    assert all("cpu_exl3" in line for line in decoder.description if "exl3" in line)
    expected, found = expected_logits(published), score(decoder, TOKENS).double()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    found = score(load_model(model), TOKENS)
    prepare_model(model)
    after = load_model(model)
    assert any("are mapped from" in line for line in after.description)
    assert torch.equal(score(after, TOKENS), found)


@pytest.mark.parametrize("shape", [(130, 72), (128, 200), (200, 256)])
@pytest.mark.skipif(library() is None, reason=absence())
def test_products_in_c(shape: tuple[int, int]) -> None:
    tensors, values = padded_layer(shape, Exl3(3, "mcg"), 4)
    weight = read(tensors, Exl3(3, "mcg"), *shape)
    bias, x = torch.arange(shape[0]) / 100, torch.randn(70, shape[1], generator=torch.Generator().manual_seed(1))
    linear = CpuTrellisLinear(weight, bias)
    for rows in (1, 5, 70):
        found = linear(x[:rows])
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), x[:rows].double() @ values.T + bias, rtol=0, atol=1e-4)
    target = Target(torch.device("cpu"), torch.float32)
    assert linear.nbytes == TRELLIS.nbytes(weight.scheme, *shape, target)


def read(tensors: dict[str, Tensor], scheme: Exl3, rows: int, columns: int) -> Exl3Weight:
    return Exl3Weight(tensors[".trellis"], tensors[".suh"][:columns], tensors[".svh"][:rows], scheme)


def test_kept_codes_stay_and_tell_their_sides(published: Published, tmp_path: Path) -> None:
    stage = QuantizeStage("rtn", Int(4, 16), ignore=("*.mlp.*", "lm_head"))
    out = compress(published.packed, tmp_path / "out", stage).out
    before, after = PackedCheckpoint.open(published.packed), PackedCheckpoint.open(out)
    kept = [module for module in after.schemes if ".mlp." in module]
    assert kept
    assert verify_structure(out).problems == ()
    for module in kept:
        assert after.files.shape(f"{module}.svh") == after.shape(module)[:1]
        assert digest(after.packed_weight(module)) == digest(before.packed_weight(module))


def test_it_is_written_with_the_padding_again(published: Published, tmp_path: Path) -> None:
    source = private_copy(published.packed, tmp_path / "source")
    (source / "quantization_config.json").write_text("{}")
    export_checkpoint(source, "exl3", tmp_path / "again")
    assert not (tmp_path / "again" / "quantization_config.json").exists()
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "again"))
    assert {name: (each.dtype, each.shape) for name, each in after.items()} == {
        name: (each.dtype, each.shape) for name, each in before.items()
    }
    biases = [name for name in after if name.endswith("_proj.bias")]
    assert biases
    for name in biases:
        size = PackedCheckpoint.open(source).shape(name.removesuffix(".bias"))[0]
        assert torch.equal(after[name][:size], before[name][:size])
        assert not after[name][size:].any()


def test_it_is_exported_dense(published: Published, tmp_path: Path) -> None:
    export_checkpoint(published.packed, "dense", tmp_path / "dense")
    files, _ = open_stored(tmp_path / "dense")
    expected = load_file(published.dense / "model.safetensors")
    for name, values in expected.items():
        if name in files:
            torch.testing.assert_close(files.tensor(name).double(), values, rtol=1e-3, atol=1e-6)


def test_signs_alone_are_cut_too(published: Published, tmp_path: Path) -> None:
    """The older layout, with 16 signs in an int16."""
    model = private_copy(published.packed, tmp_path / "model")
    stored, module = load_file(model / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    bits = (stored.pop(f"{module}.suh") < 0).view(-1, 16).to(torch.int32)
    stored[f"{module}.su"] = (bits << torch.arange(16)).sum(1).to(torch.int16)
    save_file(stored, model / "model.safetensors")
    before, after = (PackedCheckpoint.open(path).packed_weight(module) for path in (published.packed, model))
    assert torch.equal(after.suh, before.suh.sign())


def test_other_sides_than_those_of_the_padding_are_refused(published: Published, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    for count, (suffix, size) in enumerate({".suh": 130, ".svh": 384, ".bias": 5}.items()):
        model = private_copy(published.packed, tmp_path / str(count))
        stored = load_file(model / "model.safetensors") | {module + suffix: torch.ones(size).half()}
        save_file(stored, model / "model.safetensors")
        assert any(module in problem for problem in verify_structure(model).problems)


def test_tiles_that_do_not_surround_the_scales() -> None:
    tensors, _ = padded_layer((130, 200), Exl3(2), 0)
    assert read(tensors, Exl3(2), 129, 256).shape == (129, 256)
    for shape in ((128, 200), (130, 128)):
        with pytest.raises(SchemeError, match="do not fit tiles"):
            read(tensors, Exl3(2), *shape)
