"""Reader of any supported checkpoint, packed or dense, of this toolkit or another: weights by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from compress.checkpoint.config import (
    HEAD,
    ModelConfig,
    dtype_name,
    format_name,
    is_embedding,
    is_tied,
    quantization_block,
    read_config,
)
from compress.checkpoint.expert_files import split_experts
from compress.checkpoint.formats.base import CONTAINERS, Container
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.exl3 import EXL3, without_padding
from compress.checkpoint.formats.known_keys import check_keys as check_quantization_keys
from compress.checkpoint.input_rounding import InputRounding
from compress.checkpoint.safetensors import TensorFiles, renamed
from compress.checkpoint.weights import Activations, Int, Scheme, Weight
from compress.checkpoint.weights.base import Get, StoredTensors
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError, ToolkitError
from compress.models.config import block
from compress.models.known_keys import check_keys
from compress.models.registry import find_family, find_renaming, is_converted
from compress.models.wrappers import OUTER, StoredNames, TextNames, layouts_of

NONSENSE = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Errors of Python and torch where stored shapes, dtypes and entries of config.json are not what they should be."""
GROUP_INDEX = "g_idx"
"""End of the name of a tensor with the group of every column."""
REORDERED = "columns in the order of activations (desc_act), which no kernel here multiplies"
"""Property of `PackedCheckpoint.reordered` modules, in messages."""


def open_stored(path: str | Path) -> tuple[TensorFiles, ModelConfig]:
    """Reads headers and config of a model folder; of a multimodal model, those of its text model with all tensors.

    Raises:
        CheckpointError: a folder, config or shard that cannot be read, and why.
    """
    files = TensorFiles.open(path)
    config = read_config(files.path)
    model_type, whole_type = config.get("model_type"), block(config, OUTER).get("model_type")
    if find_family(model_type) is not None:
        check_keys(config)
    names: StoredNames | None
    published: Callable[[str], str] | None = None
    if whole_type is None and is_converted(model_type):
        from compress.checkpoint.modeling.conversion import ConvertedNames

        names = ConvertedNames.find(files.names(), model_type)
    else:
        names, published = TextNames.find(files, layouts_of(config)), find_renaming(whole_type or model_type)
    files = files if names is None else renamed(files, names.own, names)
    return (files if published is None else renamed(files, published, names)), config


def _schemes(kind: Container, block: Mapping[str, Any], files: TensorFiles) -> dict[str, Scheme]:
    """Reads the scheme of every quantized module; formats of other tools speak of stored names."""
    modules, layout = kind.modules(files.names()), files.text_names
    if layout is None or kind is COMPRESS_RUNTIME:
        named = kind.schemes(block, modules)
    else:
        stored = kind.schemes(block, sorted(map(layout.stored, modules)))
        named = {layout.own(module): scheme for module, scheme in stored.items()}
    return {module: scheme.found(module, files) for module, scheme in named.items()}


def _inputs(kind: Container, block: Mapping[str, Any], files: TensorFiles) -> dict[str, Activations]:
    """Reads the rounding of inputs of every module, unless its scheme includes it."""
    layout = files.text_names
    if layout is None:
        return kind.inputs(block, files.names())
    found = kind.inputs(block, sorted(map(layout.stored, files.names())))
    return {layout.own(module): activations for module, activations in found.items()}


@dataclass(frozen=True)
class PackedCheckpoint:
    """A checkpoint as modules and tensors. Weights are decoded on request and not cached.

    Attributes:
        path: the folder.
        config: config.json.
        files: the tensors as stored, and those of experts that are stored together by names of their own.
        schemes: scheme of every quantized module, in name order; empty for a dense checkpoint.
        codec: its container.
        holds_weights: whether its files hold its weights as they are, so that tensors may be read without it.
        inputs: rounding of the inputs of modules whose schemes do not include it.
    """

    holds_weights: ClassVar[bool] = True

    path: Path
    config: ModelConfig
    files: TensorFiles
    schemes: dict[str, Scheme]
    codec: Container
    inputs: Mapping[str, Activations] = field(default_factory=dict, kw_only=True)

    @classmethod
    def open(cls, path: str | Path) -> PackedCheckpoint:
        """Reads config and headers, no weights.

        Raises:
            CheckpointError: a folder, config, format or shard that cannot be read, and why.
        """
        from compress.checkpoint.transforms import without_transforms

        stored, config = open_stored(path)
        block = quantization_block(config)
        kind = CONTAINERS.find(format_name(block)) if block else DENSE
        check_quantization_keys(kind, block)
        files = split_experts(without_padding(stored, config) if kind is EXL3 else stored, config)
        try:
            schemes, inputs = _schemes(kind, block, files), _inputs(kind, block, files)
        except CheckpointError:
            raise
        except (ToolkitError, *NONSENSE) as error:
            raise CheckpointError(f"quantization_config in {files.path} cannot be used: {error}") from error
        packed = cls(files.path, config, files, schemes, kind, inputs=inputs)
        return without_transforms(packed) if block.get("transform_config") else packed

    @property
    def format(self) -> str:
        """`compressed-tensors`, `gptq`, `awq`, `compress-runtime` or `dense`."""
        return self.codec.name

    @property
    def modules(self) -> list[str]:
        """Quantized modules, sorted."""
        return list(self.schemes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that config.json names, in which dense weights and activations live."""
        return cast(torch.dtype, getattr(torch, dtype_name(self.config)))

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding matrix. As in transformers, a stored head with other numbers is not,
        whatever config.json says."""
        return is_tied(self.config, self.files.names()) and not stores_other_head(self.files)

    def describe(self) -> str:
        """Describes the storage of the weights: `compressed-tensors, w4a16 g128 sym (42 linears)`."""
        # Ranks may differ between layers; schemes that differ only in rank are counted together.
        counts = Counter(re.sub(r" rank \d+", " low rank", str(scheme)) for scheme in self.schemes.values())
        schemes = ", ".join(f"{scheme} ({count} linears)" for scheme, count in counts.most_common())
        return f"{self.format}, {schemes}" if schemes else f"dense {str(self.dtype).removeprefix('torch.')}"

    def describe_inputs(self) -> str:
        """Describes the rounding of inputs that schemes do not have: `fp8 static (42 linears)`."""
        counts = Counter(map(str, self.inputs.values()))
        return ", ".join(f"{kind} ({count} linears)" for kind, count in counts.most_common())

    def scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module; None if it is dense."""
        return self.schemes.get(module)

    def weight(self, module: str) -> Weight | Tensor:
        """Returns the weight `[O, I]` of a linear module, or its values, including zeros, if it is not quantized.

        Raises:
            CheckpointError: tensors missing or contradicting the config.
        """
        if module not in self.schemes:
            return self.tensor(f"{module}.weight")
        packed = self.packed_weight(module)
        expanded = packed.expanded()
        return expanded if isinstance(expanded, Tensor) else packed

    def packed_weight(self, module: str) -> Weight:
        """Reads the weight of a packed module. Raises CheckpointError for tensors that contradict the config."""
        return self._decoded(module, self.tensor)

    def _decoded(self, module: str, get: Get) -> Weight:
        with self._explained(module):
            return self.codec.decode(module, get, self.schemes[module], quantization_block(self.config))

    def values(self, module: str, dtype: torch.dtype) -> Tensor:
        """Reads the values `[O, I]` of a packed module, rounded once to `dtype`, with `column_order` or without.

        Raises:
            CheckpointError: tensors that contradict the config.
        """
        weight, order = self.in_groups(module)
        values = weight.dequantize(dtype)
        return values if order is None else values[:, order.argsort()]

    def in_groups(self, module: str) -> tuple[Weight, Tensor | None]:
        """Reads the weight of a packed module with the columns of a group side by side, and their `column_order`.

        Raises:
            CheckpointError: tensors that contradict the config.
        """
        order = self.column_order(module)
        if order is None:
            return self.packed_weight(module), None
        # Only integers are stored with an index of groups.
        weight = cast(CodedWeight, self._decoded(module, self._without_order))
        return replace(weight, qweight=weight.qweight[:, order]), order

    def column_order(self, module: str) -> Tensor | None:
        """Returns the columns `[I]` of a packed module in the order of their groups, where activations (desc_act) have
        mixed those, which no kernel multiplies; else None."""
        name = next((name for name in self.packed_names(module) if name.endswith(GROUP_INDEX)), None)
        if name is None:
            return None
        groups = self.tensor(name).to(torch.int64)
        with self._explained(module):
            plain = torch.arange(len(groups)) // int(self.schemes[module].group_size or len(groups))
        order = groups.argsort(stable=True)
        is_mixed = torch.equal(groups[order], plain) and not torch.equal(groups, plain)
        return order if is_mixed else None

    @cached_property
    def reordered(self) -> list[str]:
        """Packed modules with a `column_order`."""
        return [module for module in self.modules if self.column_order(module) is not None]

    def _without_order(self, name: str) -> Tensor:
        if name.endswith(GROUP_INDEX):
            raise CheckpointError(f"{name} is left out", "Read it by its name")
        return self.tensor(name)

    def input_rounding(self, module: str) -> InputRounding | None:
        """Reads the rounding of a module's inputs that its scheme does not have; None where there is none.

        Raises:
            CheckpointError: stored numbers are missing, or rounding is not computed here.
        """
        kind = self.inputs.get(module)
        return None if kind is None else InputRounding.read(kind, StoredTensors(module, self.tensor))

    def shape(self, module: str) -> tuple[int, int]:
        """Returns `(O, I)` of a linear module. Raises CheckpointError if it is missing or not a matrix."""
        scheme = self.schemes.get(module)
        with self._explained(module):
            return (self.codec if scheme else DENSE).shape(module, self.tensor, scheme or Int())

    @contextmanager
    def _explained(self, module: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (ToolkitError, *NONSENSE) as error:
            said = str(error).partition("\n")[0]
            raise CheckpointError(f"the tensors of {module} in {self.path} contradict each other: {said}") from error

    def tensor(self, name: str) -> Tensor:
        """Returns a stored tensor (a read-only view of the memory map)."""
        return self.files.tensor(name)

    def packed_names(self, module: str) -> list[str]:
        """Returns the names of a quantized weight's tensors, without its bias."""
        return [
            name
            for name in (module + suffix for suffix in self.codec.suffixes(self.schemes[module]))
            if name in self.files
        ]

    def dense_names(self) -> list[str]:
        """Returns the names of stored tensors outside quantized weights."""
        packed = {name for module in self.schemes for name in self.packed_names(module)}
        return [name for name in self.files.names() if name not in packed]

    def dense_linears(self) -> list[str]:
        """Modules with an unquantized matrix, without embeddings; includes a head tied to a dense embedding."""
        matrices = [
            name.removesuffix(".weight")
            for name in self.dense_names()
            if name.endswith(".weight") and len(self.files.shape(name)) == 2
        ]
        heads = set() if self.tied and any(map(is_embedding, self.schemes)) else self._heads()
        return sorted({each for each in matrices if not is_embedding(each)} | heads - set(self.schemes))

    def _heads(self) -> set[str]:
        """Returns the name of the output head: one outside of all modules that is recorded as dense, else the usual."""
        ignored = quantization_block(self.config).get("ignore")
        names = filter(re.compile(r"\w+").fullmatch, map(str, ignored if isinstance(ignored, list) else ()))
        return set(names) or {HEAD}

    def weight_bytes(self, module: str) -> int:
        """Returns the stored bytes of a quantized weight: codes, scales and zero points, without shapes and indices."""
        names = (name for name in self.packed_names(module) if not name.endswith((".weight_shape", GROUP_INDEX)))
        return sum(self.files.tensor_nbytes(name) for name in names)


def stores_other_head(files: TensorFiles) -> bool:
    """Returns whether a dense head is stored that differs from every dense embedding of its shape; False for files
    without values."""
    name = f"{HEAD}.weight"
    if name not in files:
        return False
    embeddings = [other for other in files.names() if is_embedding(other.removesuffix(".weight"))]
    same_shape = [other for other in embeddings if files.shape(other) == files.shape(name)]
    head = files.tensor(name)
    if head.is_meta:
        return False
    return not any(torch.equal(head, files.tensor(other).to(head.dtype)) for other in same_shape)


@dataclass(frozen=True)
class RoundedCheckpoint(PackedCheckpoint):
    """`source` with the modules of `schemes` rounded to them, under the scales with the least squared error.

    Everything else is as in the source. Nothing is written.
    """

    holds_weights = False

    source: PackedCheckpoint

    @classmethod
    def of(cls, source: PackedCheckpoint, schemes: Mapping[str, Scheme]) -> RoundedCheckpoint:
        return cls(source.path, source.config, source.files, dict(schemes), source.codec, source)

    def packed_weight(self, module: str) -> Weight:
        """Rounds the module's stored weight. Raises CheckpointError as the source does, NumericsError for NaN."""
        stored = self.source.weight(module)
        dense = stored if isinstance(stored, Tensor) else stored.dequantize()
        return self.schemes[module].round(dense)

    def shape(self, module: str) -> tuple[int, int]:
        return self.source.shape(module)
