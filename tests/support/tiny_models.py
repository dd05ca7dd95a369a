"""Tiny random models of every family, dense and packed, and transformers in true float64 to compare them with."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from compress.checkpoint.config import packed_config, read_config, write_config
from compress.checkpoint.formats import find_format, stored_tensors
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight

FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 112,
    "max_position_embeddings": 256,
}


def save_tiny_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """Random weights, with norms and biases that are seen when they are lost."""
    config = FAMILIES[family](**(SIZES | options))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float64, *, exact_norms: bool = True) -> PreTrainedModel:
    """transformers' own model.

    Args:
        exact_norms: RMSNorm computes in the model's dtype; transformers rounds to float32 there, whatever the dtype.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for module in model.modules() if exact_norms else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _rms_norm(module)
    return model


def _rms_norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    return forward


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


def random_weight(shape: tuple[int, int], scheme: Scheme, seed: int = 0, dtype=torch.bfloat16) -> Weight:
    """Every code value, scales of both signs, zero points that fit the scheme."""
    generator = torch.Generator().manual_seed(seed)
    if scheme.numbers == "float":
        return _random_floats(shape, scheme, generator, dtype)
    groups = (shape[0], scheme.num_groups(shape[1]))
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator).to(torch.uint8)
    zero = torch.full(groups, scheme.midpoint, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, groups, generator=generator).to(torch.uint8)
    sign = torch.randint(0, 2, groups, generator=generator) * 2 - 1
    scale = (torch.rand(groups, generator=generator) + 0.2) * sign * 0.5 / scheme.max_code
    return IntegerWeight(codes, scale.to(dtype), zero, scheme)


def _random_floats(shape: tuple[int, int], scheme: Scheme, generator: torch.Generator, dtype) -> Fp8Weight:
    """All 254 numbers, both zeros and the smallest among them."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    codes = numbers[torch.randint(0, len(numbers), shape, generator=generator)].view(FP8)
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.2) * 1e-3
    return Fp8Weight(codes, scale.to(dtype), scheme)


def pack_model(
    dense: Path,
    out: Path,
    scheme: Callable[[str], Scheme | None],
    format: str = "compressed-tensors",
    scale_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Weight]:
    """Copies `dense` with random codes in place of the chosen linears; gives the packed weights."""
    codec = find_format(format)
    tensors = load_file(dense / "model.safetensors")
    weights = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        chosen = scheme(module)
        if chosen is not None:
            weights[module] = random_weight(tuple(tensors.pop(name).shape), chosen, len(weights), scale_dtype)
            tensors |= stored_tensors(codec, module, weights[module], scale_dtype)
    ignored = sorted({"lm_head", *(n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight"))})
    block = codec.quantization_config({module: weight.scheme for module, weight in weights.items()}, ignored)
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    write_config(out, packed_config(read_config(dense), block, weights))
    return weights


def put_weights(model: PreTrainedModel, weights: dict[str, Weight]) -> PreTrainedModel:
    """Puts dequantized weights into transformers' model."""
    for module, weight in weights.items():
        model.get_submodule(module).weight.data = weight.dequantize(torch.float64).to(model.dtype)
    return model
