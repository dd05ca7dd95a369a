"""Written checkpoints load in plain transformers + compressed-tensors: weights bit-equal, logits equal."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from compress.checkpoint.config import read_config, write_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Activations, Fp8, Int, Mxfp4, Mxfp8, Nvfp4, Scheme
from compress.checkpoint.writer import export_checkpoint

pytest.importorskip("compressed_tensors")
TOKENS = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(1))
DEFAULT_LOAD = [
    Int(4, 128),
    Int(4, 64),
    Int(4, 32),
    Int(4, None),
    Int(8, 128),
    Int(8, None),
    Int(3, 64),
    Int(2, 32),
    Int(8, None, activations=Activations.INT8),
    Int(4, 64, activations=Activations.INT8),
    Int(4, None, activations=Activations.INT4),
    Fp8(),
    Fp8(Activations.FP8),
    Nvfp4(),
    Mxfp4(),
    Mxfp8(),
]


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same_model(theirs, reference, weights):
    """Runs both (which decompresses theirs), then compares logits and every quantized weight."""
    found, wanted = logits(theirs), logits(reference)
    for module, weight in weights.items():
        stored = theirs.get_submodule(module).weight
        assert torch.equal(stored, weight.dequantize(torch.bfloat16)), module
    assert torch.equal(found, wanted)


def reference_model(dense_folder, weights):
    """The dense model with our own dequantized weights put in."""
    model = load(dense_folder)
    for module, weight in weights.items():
        model.get_submodule(module).weight = torch.nn.Parameter(weight.dequantize(torch.bfloat16))
    return model


@pytest.mark.parametrize("scheme", DEFAULT_LOAD, ids=str)
def test_symmetric_loads_by_default(scheme, dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    assert verify_structure(tmp_path / "packed").problems == ()
    theirs = load(tmp_path / "packed")
    if scheme.activation_bits is None:
        assert_same_model(theirs, reference_model(dense_folder, weights), weights)
        return
    # Rounded activations change the logits; the weights must still be ours to the bit.
    assert torch.isfinite(logits(theirs)).all()
    for module, weight in weights.items():
        assert torch.equal(theirs.get_submodule(module).weight, weight.dequantize(torch.bfloat16)), module


@pytest.mark.parametrize("scheme", [Int(4, 64, False), Int(3, None, False), Int(8, 32, False)], ids=str)
def test_asymmetric_loads_dequantized(scheme, dense_folder, pack, tmp_path):
    from transformers import CompressedTensorsConfig

    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    theirs = load(tmp_path / "packed", quantization_config=CompressedTensorsConfig(dequantize=True))
    assert_same_model(theirs, reference_model(dense_folder, weights), weights)


def test_mixed_schemes_and_ignored_layers(dense_folder, pack, tmp_path):
    def scheme(module: str) -> Scheme | None:
        if module.endswith("layers.1.mlp.down_proj"):
            return None
        return Int(8, 64) if "down_proj" in module else Int(4, 32 if "mlp" in module else 64)

    weights = pack(dense_folder, tmp_path / "packed", scheme)
    block = read_config(tmp_path / "packed")["quantization_config"]
    assert len(block["config_groups"]) == 3
    assert "model.layers.1.mlp.down_proj" in block["ignore"]
    assert_same_model(load(tmp_path / "packed"), reference_model(dense_folder, weights), weights)


def test_quantized_head_unties(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: Int(8, 128), shapes={"lm_head": (96, 128)})
    config = read_config(tmp_path / "packed")
    assert config["tie_word_embeddings"] is False
    theirs = load(tmp_path / "packed")
    logits(theirs)
    assert torch.equal(theirs.lm_head.weight, weights["lm_head"].dequantize(torch.bfloat16))
    assert torch.equal(theirs.model.embed_tokens.weight, load(dense_folder).model.embed_tokens.weight)


def test_fused_projections(pack, tmp_path):
    """Phi-3 stores q/k/v and gate/up as one matrix each: plain linears like any other."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 64, "pad_token_id": 0}
    dense = save_tiny_model(tmp_path / "dense", "phi3", torch.bfloat16, **sizes)
    weights = pack(dense, tmp_path / "packed", lambda module: Int(4, 64))
    assert {module.rpartition(".")[2] for module in weights} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert verify_structure(tmp_path / "packed").problems == ()
    assert_same_model(load(tmp_path / "packed"), reference_model(dense, weights), weights)


def test_dense_export_is_the_dequantized_model(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: Int(4, 64))
    export_checkpoint(tmp_path / "packed", "dense", tmp_path / "dense")
    assert "quantization_config" not in read_config(tmp_path / "dense")
    assert torch.equal(logits(load(tmp_path / "dense")), logits(reference_model(dense_folder, weights)))


def test_our_reader_takes_what_compressed_tensors_writes(dense_folder, pack, tmp_path):
    """The config block as the package itself writes it, with all its optional keys, parses to the same schemes."""
    from compressed_tensors.quantization import QuantizationConfig

    pack(dense_folder, tmp_path / "packed", lambda module: Int(4, 64))
    config = read_config(tmp_path / "packed")
    block = config["quantization_config"]
    theirs = QuantizationConfig.model_validate({key: block[key] for key in ("config_groups", "ignore", "format")})
    config["quantization_config"] = {**json.loads(theirs.model_dump_json()), "quant_method": "compressed-tensors"}
    write_config(tmp_path / "packed", config)
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {Int(4, 64)}


def test_bytes_of_4_bits_are_read_and_packed(dense_folder, pack, tmp_path):
    """As llm-compressor stores weights whose inputs are rounded: one code in a byte."""
    scheme = Int(4, 64, activations=Activations.INT8)
    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    shutil.copytree(tmp_path / "packed", tmp_path / "bytes")
    tensors = load_file(tmp_path / "bytes" / "model.safetensors")
    for module, weight in weights.items():
        del tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_shape"]
        tensors[f"{module}.weight"] = (weight.qweight.to(torch.int16) - 8).to(torch.int8)
    save_file(tensors, tmp_path / "bytes" / "model.safetensors")
    text = (tmp_path / "bytes" / "config.json").read_text().replace("pack-quantized", "int-quantized")
    (tmp_path / "bytes" / "config.json").write_text(text)
    read = PackedCheckpoint.open(tmp_path / "bytes")
    assert set(read.schemes.values()) == {scheme}
    assert all(read.packed_weight(module).digest() == weight.digest() for module, weight in weights.items())
    theirs = load(tmp_path / "bytes")
    logits(theirs)
    module, weight = next(iter(weights.items()))
    assert torch.equal(theirs.get_submodule(module).weight, weight.dequantize(torch.bfloat16))
