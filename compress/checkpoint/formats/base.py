"""The interface of a container of packed checkpoints, and the registry of containers, which are files of this folder.

Weights know their own tensors; a container says which forms it holds and describes them in config.json. Containers of
other tools that hold other tensors translate them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from compress.checkpoint.weights import Activations, Scheme, Weight
from compress.checkpoint.weights.base import Get, StoredTensors, about, owners
from compress.common.errors import CheckpointError, SchemeError
from compress.common.registry import Registry

RUNTIME, TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP = "this runtime", "transformers", "vLLM", "SGLang", "llama.cpp"
EXLLAMA = "exllamav3"
Kind = TypeVar("Kind")


class Container(ABC):
    """A container of packed checkpoints.

    Attributes:
        name: as `--format` or `quant_method` spells it.
        engines: that read it, or a plugin of theirs does; which models and forms of it, `loaders.json` says.
        keys: of `quantization_config` that are read, and those that repeat what is seen by tensors.
        stored: suffixes of the tensors of a module.
        mark: suffix of the tensor that every quantized module has.
        is_written: whether checkpoints are exported to it.
    """

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]] = (RUNTIME,)
    keys: ClassVar[str] = ""
    stored: ClassVar[tuple[str, ...]] = ()
    mark: ClassVar[str] = ""
    is_written: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]:
        """Returns suffixes of a module's stored tensors; without a scheme those of any module."""
        return self.stored

    def modules(self, names: Iterable[str]) -> list[str]:
        """Returns quantized modules among tensor names, sorted."""
        return owners(names, self.mark)

    @abstractmethod
    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raises SchemeError when the container cannot hold a weight `[O, I]` of a scheme."""

    @abstractmethod
    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """Returns `quantization_config` of config.json. Raises SchemeError for schemes that it cannot describe.

        Args:
            schemes: scheme of every quantized module.
            ignored: every linear module that stays dense, by full name.
        """

    @abstractmethod
    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Returns the scheme of every module by a `quantization_config`.

        Raises:
            CheckpointError: modules that it does not describe, or a form or layout that is not read.
        """

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        """Returns the rounding of inputs, by module among tensor names, that schemes do not include."""
        return {}

    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the stored tensors of one linear layer, by full name.

        Args:
            dtype: the model's, in which scales and unquantized values are stored.

        Raises:
            SchemeError: the container cannot hold the weight, or not exactly.
        """
        with about(module):
            self.check(weight.scheme, weight.shape)
            return {module + suffix: tensor for suffix, tensor in weight.tensors(dtype).items()}

    def encode_bias(self, bias: Tensor) -> Tensor:
        """Returns the stored bias of a quantized layer."""
        return bias

    def decode(self, module: str, get: Get, scheme: Any, config: Mapping[str, Any] | None = None) -> Weight:
        """Reads the weight of one stored layer. Raises CheckpointError or SchemeError for tensors of another form."""
        return cast(Weight, scheme.read(StoredTensors(module, get)))

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        """Returns `(O, I)` of a stored layer, without decoding it."""
        return scheme.shape(StoredTensors(module, get))


def modules_by_scheme(schemes: Mapping[str, Scheme]) -> dict[Scheme, list[str]]:
    """Returns the modules of every scheme, in name order."""
    grouped: dict[Scheme, list[str]] = {}
    for module in sorted(schemes):
        grouped.setdefault(schemes[module], []).append(module)
    return grouped


def single(container: Container, found: Iterable[Kind], what: str) -> Kind:
    """Returns what all layers share. Raises SchemeError where they differ in what a container stores once."""
    kinds = set(found)
    if len(kinds) != 1:
        problem = f"{container.name} stores one {what} for all layers, not {len(kinds)}"
        raise SchemeError(problem, "Use --format compressed-tensors")
    return kinds.pop()


class ReadOnly(Container):
    """A container that is read and not written."""

    is_written = False

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        self._refuse()

    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> NoReturn:
        self._refuse()

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise SchemeError(
            f"folders with weights of {self.name} are read, not written",
            "Use --format compressed-tensors, compress-runtime or dense",
        )


CONTAINERS: Registry[Container] = Registry("quantization format", "compress.checkpoint.formats", CheckpointError)
"""Containers in the order of preference for exports; those that are only read come last."""
