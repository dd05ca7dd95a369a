"""Dense and packed checkpoints of every format give the logits of transformers on the dequantized weights."""

import pytest
import torch
from folders import change_config, change_tensors, private_copy
from safetensors.torch import load_file
from tiny_models import load_reference, pack_model, put_weights, reference_logits, save_tiny_model

from compress.checkpoint.weights import Activations, BlockFp8, Int, Mxfp4, Mxfp8, Nvfp4, Scheme
from compress.common.errors import CheckpointError, ToolkitError
from runtime.model import loader
from runtime.model.composed import SideBySide
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 21), generator=torch.Generator().manual_seed(5))
FORMATS = {
    f"compressed-tensors w{bits} {'sym' if symmetric else 'asym'} {group_size}": (
        "compressed-tensors",
        Int(bits, group_size, symmetric),
    )
    for bits in range(2, 9)
    for symmetric in (True, False)
    for group_size in (32, None)
} | {
    "gptq w4": ("gptq", Int(4, 32)),
    "gptq w8": ("gptq", Int(8, 32)),
    "awq w4 asym": ("awq", Int(4, 32, symmetric=False)),
    "fp8 blocks": ("fp8", BlockFp8((32, 32))),
    "fp8 blocks of odd sizes": ("compressed-tensors", BlockFp8((20, 36))),
    "mxfp4": ("compressed-tensors", Mxfp4()),
    "nvfp4": ("compressed-tensors", Nvfp4()),
    "mxfp8": ("compressed-tensors", Mxfp8()),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "dense", tie_word_embeddings=True, attention_bias=True)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_in_float64(name, dense, tmp_path):
    format, scheme = FORMATS[name]
    scale_dtype = torch.bfloat16 if format == "compressed-tensors" else torch.float16
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme, format, scale_dtype)
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    # A config.json of fp8 asks for rounded inputs, which the reference computes.
    for kernels in ("auto", "reference")[: 1 if format == "fp8" else 2]:
        found = score(load_model(tmp_path / "packed", dtype="float64", kernels=kernels), TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(3, 32), Int(8, 32), Int(4, 32, symmetric=False)])
def test_packed_kernels_in_bfloat16(scheme, dense, tmp_path):
    """Logits stay within the noise that bfloat16 activations bring to the same weights in plain torch."""
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme)
    exact = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    fast = score(load_model(tmp_path / "packed", dtype="bfloat16"), TOKENS)
    plain = score(load_model(tmp_path / "packed", dtype="bfloat16", kernels="reference"), TOKENS)
    assert (fast - exact).norm() < 1.5 * (plain - exact).norm() < 0.1 * exact.norm()


def test_eight_bit_activations(dense, tmp_path):
    pack_model(dense, tmp_path / "packed", lambda module: Int(8, None, True, Activations.INT8))
    exact = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    found = score(load_model(tmp_path / "packed", dtype="float32"), TOKENS)
    assert (found - exact).norm() < 0.02 * exact.norm()
    decoder = load_model(tmp_path / "packed", dtype="float32")
    assert any("w8a8 channel sym, kernel" in line for line in decoder.description)


def test_siblings_of_one_scheme_are_one_product(dense, tmp_path):
    pack_model(dense, tmp_path / "packed", lambda module: Int(4, 32))
    decoder = load_model(tmp_path / "packed")
    assert not isinstance(decoder.layers[0].attention.qkv, SideBySide)
    assert [line.split(":")[0] for line in decoder.description] == [
        "2 x q_proj+k_proj+v_proj",
        "2 x o_proj",
        "2 x gate_proj+up_proj",
        "2 x down_proj",
        "1 x head (the embedding)",
        "ops between linears",
    ]


def test_siblings_of_different_schemes(dense, tmp_path):
    def scheme(module: str) -> Scheme | None:
        schemes = {"q_proj": Int(4, 32), "k_proj": Int(8, 32), "gate_proj": Int(2, 32), "o_proj": Int(3, 64)}
        return schemes.get(module.rpartition(".")[2])

    weights = pack_model(dense, tmp_path / "packed", scheme)
    decoder = load_model(tmp_path / "packed", dtype="float64")
    assert isinstance(decoder.layers[0].attention.qkv, SideBySide)
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    torch.testing.assert_close(score(decoder, TOKENS), expected, rtol=0, atol=1e-10)


def test_quantized_biases_of_qwen2(tmp_path):
    dense = save_tiny_model(tmp_path / "dense", "qwen2")
    weights = pack_model(dense, tmp_path / "packed", lambda module: Int(4, 32))
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    found = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_memory_that_is_short_is_not_spent_on_dequantized_weights(dense, tmp_path, monkeypatch):
    weights = pack_model(dense, tmp_path / "packed", lambda module: Int(5, 32))
    monkeypatch.setattr(loader, "available_bytes", lambda device: 10_000)
    decoder = load_model(tmp_path / "packed", dtype="float64")
    assert "dequantized would need" in decoder.description[0]
    assert "kernel reference" in decoder.description[0]
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    torch.testing.assert_close(score(decoder, TOKENS), expected, rtol=0, atol=1e-10)


def test_weight_bytes_count_each_weight_once(dense):
    plain = load_model(dense, kernels="reference")
    stored = sum(tensor.nbytes for name, tensor in load_file(dense / "model.safetensors").items() if tensor.dim() == 2)
    assert plain.nbytes == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"'model.layers.1.mlp.up_proj.weight'"),
        (lambda t: t.pop("model.layers.0.input_layernorm.weight"), r"'model.layers.0.input_layernorm"),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), r"model.layers.0.self_attn.k_proj.bias"),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 95)}),
            r"down_proj\.weight .*\(64, 95\), config\.json .*\(64, 96\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), r"model\.norm\.weight .*\(63,\)"),
    ],
)
def test_tensors_that_do_not_fit_the_config(change, message, dense, tmp_path):
    folder = change_tensors(private_copy(dense, tmp_path / "broken"), change)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_unsupported_models_are_refused_before_weights_are_read(dense, tmp_path):
    folder = change_config(private_copy(dense, tmp_path / "other"), model_type="mamba")
    with pytest.raises(CheckpointError, match=r"model_type.*'mamba'"):
        load_model(folder)


def test_generation_config_that_is_not_json(dense, tmp_path):
    folder = private_copy(dense, tmp_path / "broken")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu9"}, "'tpu9'"),
        ({"device": "cuda:99"}, r"cuda:99.* \d .*--device cpu"),
        ({"dtype": "int4"}, r"'int4'.*bfloat16"),
    ],
)
def test_devices_and_dtypes(options, message, dense):
    with pytest.raises(ToolkitError, match=message):
        load_model(dense, **options)


@pytest.mark.parametrize(
    ("name", "stored", "fast", "expected"),
    [
        ("auto", "bfloat16", {"bfloat16"}, "bfloat16"),
        ("auto", "float16", {"bfloat16"}, "bfloat16"),
        ("auto", "float16", {"bfloat16", "float16"}, "float16"),
        ("auto", "bfloat16", set(), "float32"),
        ("float64", "bfloat16", set(), "float64"),
    ],
)
def test_dtype_of_slow_cpus(name, stored, fast, expected, monkeypatch):
    slow = {"bfloat16", "float16"} - fast
    monkeypatch.setattr(loader, "is_fast", lambda dtype: str(dtype).removeprefix("torch.") not in slow)
    assert loader.resolve_dtype(name, stored, torch.device("cpu")) == getattr(torch, expected)


def test_a_dtype_without_a_fast_path_is_not_silently_slow(monkeypatch):
    monkeypatch.setattr(loader, "is_fast", lambda dtype: False)
    with pytest.raises(ToolkitError, match="float16"):
        loader.resolve_dtype("float16", "float16", torch.device("cpu"))


def test_integers_that_nothing_explains_are_no_weights(dense, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = private_copy(dense, tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*int8"):
        load_model(folder)


def test_measured_scales_are_named_and_change_nothing(dense, tmp_path):
    pack_model(dense, tmp_path / "packed", lambda module: BlockFp8((32, 32)), "fp8")
    expected = score(load_model(tmp_path / "packed", dtype="float64"), TOKENS)
    names = ["model.layers.0.mlp.up_proj.activation_scale", "model.layers.0.self_attn.k_scale"]
    change_tensors(tmp_path / "packed", lambda tensors: tensors.update(dict.fromkeys(names, torch.ones(1))))
    decoder = load_model(tmp_path / "packed", dtype="float64")
    assert any(line.startswith("ignored: 2 ") and names[0] in line for line in decoder.description)
    assert torch.equal(score(decoder, TOKENS), expected)
