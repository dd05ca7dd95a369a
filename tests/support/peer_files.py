"""Writes `tests/data/peers`: small files of other tools, with logits or weights that these tools compute from them.

Run it in an environment with the packages of `PACKAGES`: `python tests/support/peer_files.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PEERS = Path(__file__).parents[1] / "data" / "peers"
PACKAGES = "auto-round", "compressed-tensors", "llmcompressor", "nvidia-modelopt", "torch", "torchao", "transformers"
VOCABULARY, TOKENS, SAMPLES = 32, 8, 4
KEPT = "config.json", "hf_quant_config.json", "model.safetensors", "expected.safetensors"
MODULES = tuple(f"model.layers.0.{name}_proj" for name in ("mlp.down", "self_attn.k"))
"""Modules of which the weights are kept."""

Compute = Callable[[Path], dict[str, Tensor]]
"""From the files of a tool to logits or weights that it computes."""
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16], "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}


def scheme(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


LLM_COMPRESSOR: dict[str, str | dict[str, Any]] = {
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "fp8-static": "FP8",
    "fp8-block": scheme(BLOCKS, {**FP8_TOKEN, "strategy": "group", "group_size": 16}),
    "int8-static": scheme(INT8_WEIGHTS, {**STATIC, "symmetric": True}),
    "int8-static-asym": scheme(INT8_WEIGHTS, {**STATIC, "symmetric": False}),
    "int8-token-asym": scheme(INT8_WEIGHTS, {**FP8_TOKEN, "type": "int", "symmetric": False}),
    "w4-fp8": scheme(INT4_WEIGHTS, FP8_TOKEN),
}
AUTO_ROUND: dict[str, dict[str, Any]] = {
    "nvfp4": {"scheme": "NVFP4"},
    "mxfp4": {"scheme": "MXFP4"},
    "mxfp8": {"scheme": "MXFP8"},
    "mxfp8-ceil": {"scheme": "MXFP8_RCEIL"},
    "fp8-static": {"scheme": "FP8_STATIC"},
    "w4": {"bits": 4, "group_size": 32, "sym": True},
    "w2": {"bits": 2, "group_size": 32, "sym": True},
    "w3-asym": {"bits": 3, "group_size": 32, "sym": False},
    "w6-asym": {"bits": 6, "group_size": 32, "sym": False},
    "w4-asym-gptq": {"bits": 4, "group_size": 16, "sym": False, "format": "auto_round:auto_gptq"},
    "w4-awq": {"bits": 4, "group_size": 32, "sym": False, "format": "auto_round:auto_awq"},
    "mixed": {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "layer_config": {"down_proj": {"bits": 8}, "k_proj": {"bits": 2, "group_size": 16}, "v_proj": {"bits": 16}},
    },
}


TORCHAO = {
    "int8": "Int8WeightOnlyConfig",
    "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
    "fp8": "Float8WeightOnlyConfig",
}


def write_source(folder: Path) -> None:
    """Writes a dense Llama of one layer with a tokenizer of its words."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.randn(parameter.shape).mul(0.15).bfloat16().float()
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(folder)


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (SAMPLES, 32), generator=generator).tolist()


def write_llm_compressor(source: Path, out: Path, recipe: str | dict[str, Any]) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = Dataset.from_list([{"input_ids": sample, "attention_mask": [1] * 32} for sample in samples()])
    chosen = {"scheme": recipe, "targets": ["Linear"]} if isinstance(recipe, str) else {"config_groups": recipe}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    options = {
        "num_calibration_samples": SAMPLES,
        "max_seq_length": 32,
        "tokenizer": AutoTokenizer.from_pretrained(source),
    }
    oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **chosen), dataset=data, **options)
    model.save_pretrained(out, save_compressed=True)


def write_auto_round(source: Path, out: Path, options: dict[str, Any]) -> None:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = [{"input_ids": torch.tensor([sample]), "attention_mask": torch.ones(1, 32).long()} for sample in samples()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    given = {"iters": 0, "disable_opt_rtn": True, "nsamples": SAMPLES, "seqlen": 32, "batch_size": 1, **options}
    name = given.pop("format", "auto_round")
    quantizer = AutoRound(model, tokenizer, dataset=data, device_map="cpu", **given)
    quantizer.quantize_and_save(str(out), format=name)


def write_torchao(source: Path, out: Path, config: str) -> None:
    """Writes the files of a case, with what torchao dequantizes."""
    import torchao.quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    options = TorchAoConfig(getattr(torchao.quantization, config)())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=options)
    model.save_pretrained(out)
    weights = {module: model.get_submodule(module).weight.dequantize().contiguous() for module in MODULES}
    save_file(weights, out / "expected.safetensors")


def write_modelopt_fp8(source: Path, out: Path) -> None:
    """Writes static 8-bit floats, with the logits of ModelOpt's quantizers in float32. The numbers are those of the
    files, in which projections that engines fuse have one scale."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    def quantized() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        return mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda model: model(torch.tensor(samples())))

    export_hf_checkpoint(quantized(), export_dir=out)
    stored, model = load_file(out / "model.safetensors"), quantized()
    for name, module in model.named_modules():
        if f"{name}.input_scale" in stored:
            module.weight_quantizer.disable()
            module.weight.data = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
            module.input_quantizer.amax = stored[f"{name}.input_scale"] * torch.finfo(torch.float8_e4m3fn).max
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    with torch.no_grad():
        save_file({"tokens": tokens, "logits": model(tokens).logits.contiguous()}, out / "expected.safetensors")


def write_modelopt_nvfp4(source: Path, out: Path) -> None:
    """Writes NVFP4 as an older version names it, by ModelOpt's tensors: its calibration needs a GPU."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors, expected = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed, scales, factor = NVFP4QTensor.quantize(tensors[name].clone(), 16)
        tensors |= {name: packed._quantized_data, f"{name}_scale": scales, f"{name}_scale_2": factor.reshape(1)}
        tensors[name.replace("weight", "input_scale")] = torch.tensor([0.002])
        if name.removesuffix(".weight") in MODULES:
            values = packed.dequantize(scale=scales, double_scale=factor, block_sizes={-1: 16}, dtype=torch.bfloat16)
            expected[name.removesuffix(".weight")] = values.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors")
    about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (out / "hf_quant_config.json").write_text(json.dumps(about))
    save_file(expected, out / "expected.safetensors")


MODELOPT = {"fp8": write_modelopt_fp8, "nvfp4": write_modelopt_nvfp4}


def logits_of(folder: Path) -> dict[str, Tensor]:
    """Computes logits by the tool's own forward pass in transformers, in float32."""
    import auto_round  # noqa: F401
    from transformers import AutoModelForCausalLM

    # These weights are made in bfloat16, at the first forward pass.
    is_grouped = any(word in (folder / "config.json").read_text() for word in ("mxfp", "nvfp"))
    dtype = torch.bfloat16 if is_grouped else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    for module in model.modules():
        if type(module).__name__ == "WeightFP8ActFP8StaticQuantLinear":
            module.dtype = torch.float32  # it computes in bfloat16
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    with torch.no_grad():
        model(tokens)
        torch.nn.Module.float(model)
        if "nvfp4-pack" in (folder / "config.json").read_text():
            widen(model, load_file(folder / "model.safetensors"))
        return {"tokens": tokens, "logits": model(tokens).logits.contiguous()}


def widen(model: torch.nn.Module, stored: dict[str, Tensor]) -> None:
    """Dequantizes NVFP4 again by numbers of compressed-tensors, in float32: bfloat16 does not hold them."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    for name, module in model.named_modules():
        if f"{name}.weight_packed" in stored:
            packed, scales, divisor = (stored[f"{name}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
            numbers = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
            module.weight.data = numbers * (scales.float() / divisor).repeat_interleave(16, 1)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Dequantizes integers by AutoRound's own layers."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored, found = load_file(folder / "model.safetensors"), {}
    for module in MODULES:
        fields = {**config, **config.get("extra_config", {}).get(module, {})}
        bits, group_size, packing = fields["bits"], fields["group_size"], config["packing_format"]
        names = ("qweight", "qzeros", "scales")
        if "awq" in packing:
            found[module] = dequantize_gemm(*(stored[f"{module}.{name}"] for name in names), bits, group_size).T
            continue
        kind = qlinear_torch_zp if "auto_gptq" in packing else qlinear_torch
        layer = kind.QuantLinear(bits, group_size, 32, 32, False)
        layer.load_state_dict({name: stored[f"{module}.{name}"] for name in names})
        found[module] = layer(torch.eye(32, dtype=torch.float16)).T
    return {name: weight.contiguous() for name, weight in found.items()}


def write_case(name: str, write: Callable[[Path], None], compute: Compute | None) -> None:
    """Writes the files of one case, and what the tool computes from them, unless `write` did."""
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        made = next(Path(place).rglob("model.safetensors")).parent
        if compute is not None:
            save_file(compute(made), made / "expected.safetensors")
        folder = PEERS / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in KEPT:
            if (made / file).is_file():
                shutil.copy(made / file, folder / file)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        source = Path(place)
        write_source(source)
        for name, recipe in LLM_COMPRESSOR.items():
            write_case(f"llm-compressor-{name}", lambda out, r=recipe: write_llm_compressor(source, out, r), logits_of)
        for name, options in AUTO_ROUND.items():
            compute = weights_of if "bits" in options else logits_of
            write_case(f"auto-round-{name}", lambda out, o=options: write_auto_round(source, out, o), compute)
        for name, config in TORCHAO.items():
            write_case(f"torchao-{name}", lambda out, c=config: write_torchao(source, out, c), None)
        for name, write in MODELOPT.items():
            write_case(f"modelopt-{name}", lambda out, w=write: w(source, out), None)
    versions = {package: version(package) for package in PACKAGES}
    (PEERS / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
