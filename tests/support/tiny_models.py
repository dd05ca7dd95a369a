"""Tiny random models of every family, dense and packed, and transformers in true float64 to compare them with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_configs import DECAYS, PADDED, SIZES
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from compress.checkpoint.config import packed_config, read_config, write_config
from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.meta_model import auto_class
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Exl3, RotatedInputs, Scheme, Weight
from compress.checkpoint.weights.coded import EXPONENTS, FLOAT8, INT, TABLE, Coded, CodedWeight
from compress.checkpoint.weights.exl3 import Exl3Weight, padded


def save_tiny_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """Random weights, with norms and biases that are seen when they are lost."""
    config = AutoConfig.for_model(family, **(SIZES | options))
    torch.manual_seed(0)
    model = auto_class(family).from_config(config).to(dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith(DECAYS):
            continue
        nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3 if tensor.dim() == 1 else 0.15)
    if family in PADDED:
        model.get_input_embeddings().weight.data[config.pad_token_id] = 0
    model.save_pretrained(folder)
    return folder


class StayInFloat64(TorchFunctionMode):
    """Computes in float64 what models round to float32 whatever their dtype, such as norms."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.polar:
            # Its float32 sines and cosines have other last bits than those of two functions.
            length, angle = args
            return torch.complex(length * angle.cos(), length * angle.sin())
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(map(_kept, args))
            kwargs = {name: _kept(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _kept(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_reference(folder: Path, dtype: torch.dtype = torch.float64, *, exact: bool = True) -> PreTrainedModel:
    """transformers' own model.

    Args:
        exact: a float64 model computes everything in float64.
    """
    # Grouped products of experts are 16-bit only.
    family = read_config(folder)["model_type"]
    model = auto_class(family).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    return compute_in_float64(model) if exact and dtype is torch.float64 else model


def compute_in_float64(model: Any) -> Any:
    """Makes a module of transformers, and the norms in it, compute everything in float64."""
    compute_decays(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.double()
        if module is model or type(module).__name__.endswith("Norm"):
            module.forward = _in_float64(module.forward)
    return model


def compute_decays(model: Any) -> None:
    """Replaces tables of decays that were rounded to float32."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            torch.set_default_dtype(torch.float64)
            module.slope_rate = module.get_slope_rate()
            torch.set_default_dtype(torch.float32)
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


def _in_float64(compute: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with StayInFloat64():
            return compute(*args, **kwargs)

    return forward


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


def random_weight(shape: tuple[int, int], scheme: Scheme, seed: int = 0, dtype=torch.bfloat16) -> Weight:
    """Every code value, scales of both signs, zero points that fit the scheme."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(scheme, Exl3):
        return _random_trellis(shape, scheme, generator)
    if isinstance(scheme, RotatedInputs):
        return scheme.wrap(random_weight(shape, scheme.inner, seed, dtype))
    if scheme.numbers != INT:
        return _random_floats(shape, scheme, generator, dtype)
    groups = (shape[0], scheme.num_groups(shape[1]))
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator).to(torch.uint8)
    zero = torch.full(groups, scheme.zero, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, groups, generator=generator).to(torch.uint8)
    sign = torch.randint(0, 2, groups, generator=generator) * 2 - 1
    scale = (torch.rand(groups, generator=generator) + 0.2) * sign * 0.5 / scheme.max_code
    return scheme.weight(codes, scale.to(dtype), zero)


def _random_trellis(shape: tuple[int, int], scheme: Exl3, generator: torch.Generator) -> Exl3Weight:
    tiles = [padded(size) // 16 for size in reversed(shape)]
    trellis = torch.randint(-(2**15), 2**15, (*tiles, 8 * scheme.pair_bits), generator=generator)
    scales = [(torch.rand(size, generator=generator) + 0.5) * 0.2 for size in reversed(shape)]
    signs = [torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1 for scale in scales]
    suh, svh = ((scale * sign).half() for scale, sign in zip(scales, signs, strict=True))
    return Exl3Weight(trellis.to(torch.int16), suh, svh, scheme)


def _random_floats(shape: tuple[int, int], scheme: Coded, generator: torch.Generator, dtype) -> Weight:
    """All 254 numbers (16 of 4 bits), both zeros and the smallest among them."""
    groups = -(-shape[0] // scheme.block_rows), scheme.num_groups(shape[1])
    if scheme.numbers == TABLE:
        codes = torch.randint(0, len(scheme.code_values), shape, dtype=torch.uint8, generator=generator)
        first, last, factor = 120, 126, 0.1
    else:
        numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
        codes = numbers[torch.randint(0, len(numbers), shape, generator=generator)].view(FP8)
        first, last, factor = 112, 118, 1e-3
    if scheme.scales.dtype == EXPONENTS:
        return CodedWeight(codes, torch.randint(first, last, groups, dtype=torch.uint8, generator=generator), scheme)
    if scheme.scales.divisor_bits:
        scales = torch.randint(1, 127, groups, dtype=torch.uint8, generator=generator).view(FP8)
        return CodedWeight(codes, scales, scheme, divisors=torch.full((shape[0], 1), 3e3))
    scales = (torch.rand(groups, generator=generator) + (0.2 if scheme.numbers == FLOAT8 else 0)) * factor
    return CodedWeight(codes, scheme.repeated(scales if scheme.scales.dtype else scales.to(dtype), shape), scheme)


def pack_model(
    dense: Path,
    out: Path,
    scheme: Callable[[str], Scheme | None],
    format: str = "compressed-tensors",
    scale_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Weight]:
    """Copies `dense` with random codes in place of the chosen linears; gives the packed weights."""
    codec = CONTAINERS.find(format)
    files = PackedCheckpoint.open(dense).files
    tensors = {name: files.tensor(name) for name in files}
    weights = {}
    for name in filter(_is_packed, list(tensors)):
        module = name.removesuffix(".weight")
        chosen = scheme(module)
        if chosen is not None:
            weights[module] = random_weight(tuple(tensors.pop(name).shape), chosen, len(weights), scale_dtype)
            tensors |= codec.encode(module, weights[module], scale_dtype)
    ignored = sorted({"lm_head", *(n.removesuffix(".weight") for n in tensors if _is_packed(n))})
    block = codec.quantization_config({module: weight.scheme for module, weight in weights.items()}, ignored)
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    write_config(out, packed_config(read_config(dense), block, weights))
    return weights


def _is_packed(name: str) -> bool:
    return name.endswith(("_proj.weight", ".wq_b.weight", ".wk.weight")) and "indexer.weights_proj" not in name


def put_weights(model: PreTrainedModel, weights: dict[str, Weight]) -> PreTrainedModel:
    """Puts dequantized weights into transformers' model."""
    for module, weight in weights.items():
        model.get_submodule(module).weight.data = weight.dequantize(torch.float64).to(model.dtype)
    return model


def put_checkpoint(model: PreTrainedModel, checkpoint: PackedCheckpoint) -> PreTrainedModel:
    """Puts all that a checkpoint stores into transformers' model, dequantized."""
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        is_packed = module in checkpoint.schemes
        stored = checkpoint.weight(module).dequantize(torch.float64) if is_packed else checkpoint.tensor(name)
        parameter.data = stored.to(parameter.dtype)
    return model
