"""Plugin by which vLLM loads checkpoints in the format compress-runtime: low rank, 2:4 and int4, 16-bit columns, EXL3.

vLLM calls `register` at its start (entry point `vllm.general_plugins`). It has no kernels for these forms, so weights
are expanded to the model's dtype as they are loaded: the quality is that of the packed checkpoint, memory and speed are
those of a dense model. What compressed-tensors can say keeps kernels of vLLM: `compress export --format
compressed-tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from compress.checkpoint.config import HEAD
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.base import Get, StoredTensors
from compress.common.errors import CheckpointError, SchemeError

DENSE = ".weight"
EXPORT = "Use compress export --format dense"
Part: TypeAlias = str | int | tuple[int, ...] | None
"""A weight among those that vLLM holds side by side: q, k or v, a number, several that are stored as one, None where
there is one."""
Collected: TypeAlias = dict[Part, dict[str, Tensor]]
"""Stored tensors by weight and suffix."""


class CompressRuntimeConfig(QuantizationConfig):
    """`quantization_config` of a checkpoint: the scheme of each packed module, by the names of its files."""

    def __init__(self, schemes: Mapping[str, Scheme]) -> None:
        super().__init__()
        self.schemes = schemes

    def get_name(self) -> str:
        return COMPRESS_RUNTIME.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # dense products run everywhere

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # it is in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressRuntimeConfig:
        return cls(COMPRESS_RUNTIME.schemes(config, packed_modules(config)))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> str | None:
        """Claims a config of this format, which has no `quant_method` so that transformers refuses it. Raises
        SchemeError: a packed head with tied embeddings, which vLLM would leave out."""
        if hf_quant_cfg.get("format") != COMPRESS_RUNTIME.name:
            return None
        if getattr(hf_config, "tie_word_embeddings", False) and HEAD in packed_modules(hf_quant_cfg):
            raise SchemeError("vLLM does not load a head of its own with tied embeddings", EXPORT)
        return COMPRESS_RUNTIME.name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The way to load a layer; None leaves it to vLLM. Raises SchemeError: packed experts of a mixture, which vLLM
        loads by other ways."""
        parent, _, name = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(name, [name])
        schemes = [self.schemes.get(f"{parent}.{part}" if parent else part) for part in parts]
        if any(schemes) and isinstance(layer, LinearBase):
            return ExpandedLinear(schemes)
        if any(schemes) and isinstance(layer, VocabParallelEmbedding):
            return ExpandedEmbedding(schemes)
        if any(module.startswith(f"{prefix}.") for module in self.schemes):
            raise SchemeError(f"vLLM cannot load the packed layers of {prefix}", EXPORT)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class Expanded(QuantizeMethodBase):
    """A layer of one weight, or of several side by side, whose stored tensors are collected and then expanded.
    `schemes`: of each weight in order; None where it is dense."""

    schemes: list[Scheme | None]

    def create_weights(self, layer: Any, *args: Any, **attributes: Any) -> None:
        super().create_weights(layer, *args, **attributes)
        collected: Collected = {}
        layer.collected, layer.load_dense = collected, layer.weight.weight_loader
        layer.weight.weight_loader = partial(collect, collected, DENSE)
        for suffix in {suffix for scheme in self.schemes if scheme for suffix in scheme.suffixes} - {DENSE}:
            register_collector(layer, suffix, partial(collect, collected, suffix))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expands what was collected. Raises CheckpointError unless that are all weights."""
        if len(layer.collected) != len(self.schemes):
            raise CheckpointError(f"{len(layer.collected)} of {len(self.schemes)} weights are stored for {layer}")
        in_order = sorted(layer.collected.items(), key=lambda item: part_index(item[0]))
        for place, (part, tensors) in enumerate(in_order):
            # Values that are the keys are stored, and described, once.
            scheme = self.schemes[place] or (None if DENSE in tensors else self.schemes[place - 1])
            stored = StoredTensors("", getter(tensors))
            values = scheme.read(stored).dequantize(layer.weight.dtype) if scheme else stored[DENSE]
            layer.load_dense(layer.weight, values, *(() if part is None else (part,)))
        layer.collected.clear()
        super().process_weights_after_loading(layer)


class ExpandedLinear(Expanded, UnquantizedLinearMethod):
    """A linear layer that is multiplied as a dense one."""

    def __init__(self, schemes: list[Scheme | None]) -> None:
        super().__init__()
        self.schemes = schemes


class ExpandedEmbedding(Expanded, UnquantizedEmbeddingMethod):
    """An embedding or an output head that is looked up as a dense one."""

    def __init__(self, schemes: list[Scheme | None]) -> None:
        super().__init__()
        self.schemes = schemes

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return functional.embedding(input_, layer.weight)


def packed_modules(config: Mapping[str, Any]) -> list[str]:
    """Names of the modules that `quantization_config` lists."""
    return [name for group in config["groups"] for name in group["modules"]]


def register_collector(layer: nn.Module, suffix: str, load: Callable[..., None]) -> None:
    """Registers an empty parameter, at the place that a stored tensor's suffix says, whose loader is `load`."""
    *parents, name = suffix.removeprefix(".").split(".")
    for parent in parents:
        if not hasattr(layer, parent):
            layer.add_module(parent, nn.Module())
        layer = layer.get_submodule(parent)
    parameter: Any = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = load
    layer.register_parameter(name, parameter)


def collect(collected: Collected, suffix: str, parameter: Tensor, loaded: Tensor, part: Part = None) -> None:
    """Keeps a stored tensor, with the signature of vLLM's loaders of weights."""
    collected.setdefault(part, {})[suffix] = loaded.cpu()


def part_index(part: Part) -> int:
    """Index of a weight among those side by side, from the name that vLLM gives it: q, k, v, a number, or several."""
    if isinstance(part, tuple):
        return part[0]
    return "qkv".index(part) if isinstance(part, str) else part or 0


def getter(tensors: Mapping[str, Tensor]) -> Get:
    """Gives tensors by suffix; raises CheckpointError for one that is missing."""

    def get(suffix: str) -> Tensor:
        if suffix not in tensors:
            raise CheckpointError(f"{suffix} is not stored with {', '.join(sorted(tensors))}")
        return tensors[suffix]

    return get


def register() -> None:
    """Adds the format to vLLM's; it may be called again."""
    register_quantization_config(COMPRESS_RUNTIME.name)(CompressRuntimeConfig)
