"""Transformer block of a run: its weights, its plan, and the records of its compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from compress.checkpoint.dequantized import stored_scheme
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import about, digest
from compress.common.device import count_nonfinite
from compress.common.errors import NumericsError
from compress.common.workers import Workers, module_on
from compress.make_plan import check_shape
from compress.methods.base import TuningRecord
from compress.models.architecture import SmoothingMapping
from compress.pipeline.expert_inputs import ExpertCoverage
from compress.pipeline.skeleton import Skeleton
from compress.plan import LayerPlan

if TYPE_CHECKING:
    from compress.pipeline.prepare import RunContext


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """Record of one linear for the report.

    Attributes:
        input_outlier: ratio of the largest input to the median of the channels' maxima, before smoothing; None without
            observations.
        kept_whole: reason why a planned factorization was skipped; empty otherwise.
    """

    module: str
    method: str
    relative_error: float
    recovery: str = ""
    damping: float | None = None
    dead_columns: int = 0
    clipped: bool = False
    pruning: str = ""
    zeros: float = 0.0
    input_outlier: float | None = None
    factoring: str = ""
    rank: int | None = None
    kept_whole: str = ""


@dataclass(frozen=True, slots=True)
class SmoothingRecord:
    """Record of one smoothing mapping."""

    source: str
    targets: tuple[str, ...]
    ratio: float
    loss_before: float
    loss_after: float


@dataclass
class BlockOutcome:
    """Result of compressing a block.

    Attributes:
        weights: packed weights by full module name.
        kept: weights that keep the codes of a quantized source, by full module name.
        pruned: pruned weights stored dense with their zeros, by full tensor name.
        dense: tensors that stay dense, by full name, as stored.
        hidden: `[N, L, H]`, input of the next block; None without calibration.
        reference: `[N, L, H]`, input of the next block in the dense model; None if not needed.
        relative_error: squared error of the block's output, relative to the squared residual update, on search
            sequences.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    kept: dict[str, Weight] = field(default_factory=dict)
    pruned: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    reference: Tensor | None = None
    relative_error: float | None = None
    linears: list[LinearRecord] = field(default_factory=list)
    smoothing: list[SmoothingRecord] = field(default_factory=list)
    tuning: TuningRecord | None = None
    coverage: tuple[ExpertCoverage, ...] = ()

    def keep(self, stored: Weight | Tensor, record: LinearRecord) -> None:
        """Adds the result of one linear, moved to host memory."""
        stored = stored.to("cpu")
        if isinstance(stored, Tensor):
            self.pruned[f"{record.module}.weight"] = stored
        else:
            self.weights[record.module] = stored
        self.linears.append(record)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the stored tensors by full name. Raises SchemeError for a weight that cannot be stored. `dtype`:
        dtype of the model, in which scales and unquantized values are stored."""
        stored = self.dense | self.pruned
        for module, weight in self.weights.items():
            with about(module):
                weight.scheme.check(weight.shape)
                stored |= {module + suffix: tensor for suffix, tensor in weight.tensors(dtype).items()}
        for module, weight in self.kept.items():
            stored |= {module + suffix: tensor for suffix, tensor in weight.exact_tensors(dtype).items()}
        return stored

    def facts(self) -> dict[str, Any]:
        """Returns plain values for the piece's metadata and the report, with the scheme and the digest of every
        weight."""
        return {
            "schemes": {module: weight.scheme.to_dict() for module, weight in (self.weights | self.kept).items()},
            "digests": {name: digest(weight) for name, weight in (self.weights | self.kept | self.pruned).items()},
            "relative_error": self.relative_error,
            "linears": [asdict(record) for record in self.linears],
            "smoothing": [asdict(record) for record in self.smoothing],
            "tuning": asdict(self.tuning) if self.tuning else None,
            "experts": [asdict(each) for each in self.coverage],
        }


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Plan of one block."""

    index: int
    layer_plans: Mapping[str, LayerPlan]
    smoothing_mappings: Sequence[SmoothingMapping]
    scale_dtype: torch.dtype
    head_dim: int = 1
    seed: int = 0

    @classmethod
    def of(cls, context: RunContext, index: int) -> BlockJob:
        skeleton, plan = context.skeleton, context.plan
        layer_plans, seed = plan.in_block(skeleton.block_name(index)), context.request.recipe.seed
        return cls(
            index, layer_plans, plan.smoothing_mappings[index], context.scale_dtype, skeleton.head_dim(index), seed
        )

    @property
    def tuned(self) -> LayerPlan | None:
        """Plan of learned rounding, which all affected linears share; None without learned rounding."""
        return next((each for each in self.layer_plans.values() if each.is_tuned), None)

    @property
    def with_quantized_inputs(self) -> dict[str, Scheme]:
        """Linears with 8-bit inputs at serving time."""
        schemes = {name: each.scheme for name, each in self.layer_plans.items() if each.scheme}
        return {name: scheme for name, scheme in schemes.items() if scheme.activation_bits}


@dataclass
class LoadedBlock:
    """Block loaded into memory.

    Attributes:
        name: name in the model, e.g. `model.layers.3`.
        weights: float32 `[O, I]` masters of the linears to quantize, by name inside the block.
        dense: tensors that stay dense, in their stored dtype, by name inside the block; excludes tensors that keep the
            codes of a quantized source.
    """

    name: str
    module: nn.Module
    weights: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)

    def copies(self, workers: Workers) -> list[LoadedBlock]:
        """Returns this block for the first worker and a copy of its module, on its device, for each other one."""
        return [self, *(replace(self, module=module_on(self.module, each.device)) for each in workers.all[1:])]

    def linear(self, name: str) -> nn.Linear:
        return cast(nn.Linear, self.module.get_submodule(name))

    def set_weight(self, linear: str, weight: Tensor) -> None:
        """Puts `weight [O, I]` into a linear, in the dtype of computation."""
        parameter = self.linear(linear).weight
        parameter.data = weight.to(parameter.device, parameter.dtype)

    def set_dense(self, name: str, tensor: Tensor) -> None:
        """Replaces a dense tensor, both for storage and for computation."""
        self.dense[name] = tensor
        parameter = self.module.get_parameter(name)
        parameter.data = tensor.to(parameter.device, parameter.dtype)


def load_block(
    skeleton: Skeleton, files: TensorFiles, index: int, quantized: set[str], device: torch.device, dtype: torch.dtype
) -> LoadedBlock:
    """Reads block `index` from the checkpoint. Raises CheckpointError: a tensor is missing or its shape differs from
    the model's; NumericsError: a tensor holds NaN or infinity. `quantized`: names inside the block of linears that get
    float32 masters."""
    block = read_block(skeleton, files, index, quantized, device)
    fill(block.module, block.name, files, device, dtype)
    return block


def read_block(
    skeleton: Skeleton,
    files: TensorFiles,
    index: int,
    quantized: set[str],
    device: torch.device,
    masters: torch.dtype | None = torch.float32,
) -> LoadedBlock:
    """Returns the tensors of block `index` without a module for computation, for methods without calibration.
    `masters`: dtype of the weights of `quantized`; None leaves them as stored, on memory-mapped pages."""
    block = LoadedBlock(skeleton.block_name(index), skeleton.blocks[index])
    prefix = f"{block.name}."
    for name in [name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)]:
        linear, _, leaf = name.rpartition(".")
        if leaf == "weight" and linear in quantized:
            block.weights[linear] = files.tensor(f"{block.name}.{name}").to(device, masters)
        elif stored_scheme(files, f"{block.name}.{name}") is None:
            block.dense[name] = files.tensor(f"{block.name}.{name}")
    return block


def fill(module: nn.Module, prefix: str, files: TensorFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Loads every parameter and stored buffer of `module` from the tensor `<prefix>.<name>`, as `dtype` on `device`."""
    for name, parameter in list(module.named_parameters()):
        tensor = read_tensor(files, f"{prefix}.{name}", tuple(parameter.shape))
        owner, _, leaf = name.rpartition(".")
        # clone() detaches small tensors from the memory map, whose pages are released while the block computes.
        value = tensor.to(device, dtype) if tensor.dtype != dtype or device.type != "cpu" else tensor.clone()
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        stored = f"{prefix}.{name}"
        value = read_tensor(files, stored, tuple(buffer.shape)).clone() if stored in files else buffer
        setattr(module.get_submodule(owner), leaf, value.to(device))


def release(module: nn.Module) -> None:
    """Moves the parameters back to the meta device; buffers stay, because files may not contain them."""
    for owner in module.modules():
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, leaf, nn.Parameter(parameter.data.to("meta"), requires_grad=False))


def read_tensor(files: TensorFiles, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a finite floating point tensor of the expected shape. Raises CheckpointError or NumericsError."""
    check_shape(files, name, shape)
    tensor = files.tensor(name)
    check_finite(name, tensor)
    return tensor


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises NumericsError if a tensor contains NaN or infinity."""
    if bad := count_nonfinite(tensor):
        raise NumericsError(
            f"{name} holds {bad} NaN or infinite values among {tensor.numel()}",
            "Get an intact copy of the model; nothing was written",
        )
