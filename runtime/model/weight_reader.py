"""Reads tensors of a checkpoint and prepares weights for their kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.activations import AS_STORED
from compress.checkpoint.input_rounding import InputRounding
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import BesideColumns, Factors, Turned
from compress.common.errors import CheckpointError
from compress.models.cuts import Cut
from compress.models.linear import Linear as LinearSpec
from compress.models.norm import Norm
from compress.models.rope import Rope
from runtime.backends.backend import DenseKernel, LinearKernel
from runtime.backends.base import Linear, NormWeights, Target
from runtime.backends.registry import REFERENCE, Choice, choose_dense, choose_linear, dense_kernels, turned_linear
from runtime.backends.self_test import prepare_tested
from runtime.backends.torch.quantized_linear import RoundedInputs
from runtime.core.progress import Report, Stage, ignore
from runtime.model.composed import LowRank, SideBySide, WithOutliers, fuse_biases, fuse_weights
from runtime.model.device_files import DeviceReader, unpacked_on, unpacks_anywhere
from runtime.model.embedding import Rows
from runtime.model.prepared import NOTHING_PREPARED, NoPrepared
from runtime.model.rotary import HeadRotation, channel_order
from runtime.parallel.group import Group
from runtime.parallel.parts import PaddedInputs, SharedSquares, SummedProducts, cut_vector, cut_weight

logger = logging.getLogger("runtime.model")


@dataclass(frozen=True)
class WeightReader:
    """Reads what is inside of one module, or of the whole model, and counts the kernels in use.

    Attributes:
        excluded: kernels that may not be chosen, with the reason; receives those that err.
        prefix: in front of every name.
        prepared: weights that need not be packed.
        notes: first lines of the description.
        device_reader: reads into the memory of a device other than the CPU.
        tested: names of kernels and the forms that they multiplied as plain torch does.
        of_expert: what is read is an expert of a mixture.
        rotations: rotary embeddings of the model, with the sizes of the heads that they rotate.
        report: is told what is compiled.
        linears: how many linears each kernel multiplies, by their names, form and the kernel's name.
        cuts: parts of matrices and vectors to read, by full name; others are read whole.
        group: of the ranks that share matrices; None for one that has whole ones.
        modules: what `linear` made, see `Model.modules`.
    """

    checkpoint: PackedCheckpoint
    target: Target
    kernels: str
    excluded: dict[str, str]
    used: Counter[str] = field(default_factory=Counter)
    prefix: str = ""
    prepared: NoPrepared = NOTHING_PREPARED
    notes: tuple[str, ...] = ()
    device_reader: DeviceReader | None = None
    tested: set[tuple[str, str]] = field(default_factory=set)
    of_expert: bool = False
    rotations: Sequence[tuple[Rope, int]] = ()
    report: Report = ignore
    linears: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    group: Group | None = None
    modules: list[tuple[tuple[tuple[str, int], ...], Linear]] = field(default_factory=list)

    def inside(self, module: str) -> WeightReader:
        """Returns the reader of what is inside of a module."""
        return replace(self, prefix=f"{self.prefix}{module}.")

    @property
    def wide(self) -> torch.dtype:
        """The dtype of activations, float32 at least."""
        return torch.promote_types(self.target.dtype, torch.float32)

    def norm(self, norm: Norm) -> NormWeights:
        """Reads a norm."""
        dtype = self.wide if norm.in_float32 or norm.offset or norm.centered else self.target.dtype
        device = self.target.device
        weight = (
            self.vector(norm.tensor, dtype) if norm.has_weight else torch.ones(norm.size, dtype=dtype, device=device)
        )
        bias = self.vector(f"{norm.name}.bias", dtype) if norm.bias else None
        squares = None if norm.share is None or self.group is None else SharedSquares(norm.share, self.group.sum)
        weight = weight + norm.offset if norm.offset else weight
        return NormWeights(weight, norm.eps, bias, norm.centered, norm.is_plain, squares)

    def optional_norm(self, norm: Norm | None) -> NormWeights | None:
        """Reads a norm, if there is one."""
        return None if norm is None else self.norm(norm)

    def rotation(self, rotation: tuple[Rope, int] | None) -> HeadRotation | None:
        """Finds one of the model's rotary embeddings, if it is one."""
        if rotation is None:
            return None
        order = channel_order(*rotation)
        return HeadRotation(self.rotations.index(rotation), None if order is None else order.to(self.target.device))

    def rows(self, embedding: str) -> Rows:
        """Reads a weight whose rows are looked up. Raises CheckpointError for a form that has none."""
        weight = self.weight(embedding)
        if not isinstance(weight, Rows):
            raise CheckpointError(f"{embedding} is stored as {weight.scheme}", "Pack embeddings as plain integers")
        return weight

    def weight(self, module: str) -> Weight | Tensor:
        """Reads a weight as stored, or its part. Dense ones come to the device; plain integers are unpacked there."""
        found, cut = self._whole(f"{self.prefix}{module}"), self.cuts.get(f"{self.prefix}{module}")
        return found if cut is None else cut_weight(found, cut)

    def _whole(self, module: str) -> Weight | Tensor:
        reader = self.device_reader
        scheme = self.checkpoint.scheme(module)
        if reader is None or not self.checkpoint.holds_weights or not (scheme is None or unpacks_anywhere(scheme)):
            return self.checkpoint.weight(module)
        if scheme is None:
            return reader.tensor(self.checkpoint.files[f"{module}.weight"])
        return unpacked_on(self.checkpoint, module, reader).to(reader.device)

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a dense tensor, or its part, in a dtype, or in that of activations."""
        found, cut = self.checkpoint.tensor(f"{self.prefix}{name}"), self.cuts.get(f"{self.prefix}{name}")
        found = found if cut is None else cut_vector(found, cut)
        return found.to(self.target.device, dtype or self.target.dtype)

    def linear(self, *linears: LinearSpec) -> Linear:
        """Makes one linear of several over one input, fused when they can be."""
        made = self._side_by_side(linears)
        self.modules.append((tuple((f"{self.prefix}{each.name}", each.out_features) for each in linears), made))
        return made

    def _side_by_side(self, linears: Sequence[LinearSpec]) -> Linear:
        roundings = [self.rounding(f"{self.prefix}{linear.name}") for linear in linears]
        first = roundings[0]
        if any(each is not first and (each is None or not each.equals(first)) for each in roundings):
            return SideBySide(tuple(self.linear(linear) for linear in linears))
        made = self._fused(linears)
        made = made if first is None else RoundedInputs(made, first)
        cut = self.cuts.get(f"{self.prefix}{linears[0].name}")
        return made if cut is None or not any(cut.padding) else PaddedInputs(made, cut.padding)

    def summed(self, linear: LinearSpec) -> Linear:
        """Makes a linear of whose inputs a rank has a part, and that gives all of them the sum of their products."""
        made = self.linear(linear)
        return made if self.group is None else SummedProducts(made, self.group.sum)

    def rounding(self, module: str) -> InputRounding | None:
        """Reads the rounding of a module's inputs, and counts it; None where they keep 16 bits, or where the kernel
        rounds them."""
        found = self.checkpoint.input_rounding(module) if self.kernels in (AS_STORED, REFERENCE) else None
        if found is None:
            return None
        self.used[f"inputs of {module.rpartition('.')[2]}: rounded to {found.kind}"] += 1
        return found.to(self.target.device)

    def _fused(self, linears: Sequence[LinearSpec]) -> Linear:
        names, sizes = [linear.name.rpartition(".")[2] for linear in linears], [each.out_features for each in linears]
        biases = [self.vector(f"{linear.name}.bias") if linear.bias else None for linear in linears]
        label, bias = "+".join(names), fuse_biases(biases, sizes)
        modules = tuple(f"{self.prefix}{linear.name}" for linear in linears)
        if (ready := self.restore(modules, (sum(sizes), linears[0].in_features), label, bias)) is not None:
            return ready
        weights = [self.weight(linear.name) for linear in linears]
        fused = fuse_weights(weights)
        if fused is None:
            parts = zip(weights, names, biases, ((module,) for module in modules), strict=True)
            return SideBySide(tuple(self.prepare(*part) for part in parts))
        return self.prepare(fused, label, bias, modules)

    def restore(self, modules: Sequence[str], shape: tuple[int, int], name: str, bias: Tensor | None) -> Linear | None:
        """Makes one linear `[O, I]` of modules that are prepared for the kernel of their scheme; None where they are
        not."""
        scheme = self.checkpoint.scheme(modules[0])
        depends_on_values = scheme is None and self.kernels in (kernel.mode for kernel in dense_kernels())
        if type(self.prepared) is NoPrepared or depends_on_values:
            return None
        choice: Choice[LinearKernel[Any]] | Choice[DenseKernel]
        choice = choose_dense(*shape, self.target, self.kernels) if scheme is None else self._choose(scheme, shape[1])
        layout = choice.kernel.layout
        try:
            weight = self.prepared.find(modules, layout)
            if weight is None or layout is None or weight.shape != shape:
                return None
            linear = layout.restore(weight, bias)
        except CheckpointError as error:
            self.used[f"{name}: packed again, {error.problem}"] += 1
            return None
        self._use_linear(name, scheme, choice)
        return linear

    def use(self, what: str, choice: Choice[Any], where: str = "") -> None:
        """Counts the use of a kernel; logs the first one with all reasons at level debug."""
        line = f"{what} ({choice.shown}){where}"
        if line not in self.used:
            logger.debug("%s (%s)%s", what, choice.reason, where)
        self.used[line] += 1

    def _use_linear(self, name: str, scheme: Scheme | None, choice: Choice[Any]) -> None:
        form = f"dense {str(self.target.dtype).removeprefix('torch.')}" if scheme is None else str(scheme)
        self.linears[name, form, choice.kernel.name] += 1
        self.use(f"{name}: {form}, kernel {choice.kernel.name}", choice)

    def prepare_module(self, module: str, weight: Tensor | None, bias: Tensor | None) -> Linear:
        """Makes one linear from its dense weight, or from the packed one of its name."""
        made = self.prepare(self.weight(module) if weight is None else weight, module.rpartition(".")[2], bias)
        rounding = self.rounding(f"{self.prefix}{module}")
        return made if rounding is None else RoundedInputs(made, rounding)

    def prepare(
        self, weight: Weight | Tensor, name: str, bias: Tensor | None = None, modules: Sequence[str] = ()
    ) -> Linear:
        """Makes one linear from its weight.

        Args:
            name: for the description.
            modules: whose weight it is, where it may be kept for the next start.
        """
        if isinstance(weight, Tensor):
            return self._prepare_dense(weight, name, bias, modules)
        product = weight.product()
        if isinstance(product, Factors):
            right = self.prepare(product.right, f"{name}, right factor")
            return LowRank(right, self.prepare(product.left, f"{name}, left factor", bias))
        if isinstance(product, BesideColumns):
            columns = product.columns.to(self.target.device, torch.int64)
            values = product.values.to(self.target.device, self.target.dtype).T.contiguous()
            beside = f"{name} next to {len(columns)} columns in 16 bits"
            return WithOutliers(self.prepare(product.base, beside, bias), columns, values)
        if isinstance(product, Turned):
            turned = f"{name} of inputs times Hadamard matrices of order {product.order}"
            base = self.prepare(product.base, turned, bias)
            return turned_linear(base, weight.shape[1], product.order, self.target, self.kernels)
        choose = partial(self._choose, weight.scheme, weight.shape[1])
        tests = self.excluded, self.tested, partial(self.report, Stage.COMPILATION)
        choice, linear = prepare_tested(weight.expanded(), bias, self.target, choose, *tests)
        self._use_linear(name, weight.scheme, choice)
        return self.prepared.keep(modules, choice.kernel.layout, linear, bias)

    def description(self) -> list[str]:
        """Describes the kernels in use, one line each."""
        prepared = [self.prepared.note] if self.prepared.note else []
        return [*self.notes, *(f"{count} x {what}" for what, count in self.used.items()), *prepared]

    def _prepare_dense(self, weight: Tensor, name: str, bias: Tensor | None, modules: Sequence[str]) -> Linear:
        placed = weight.to(self.target.device, self.target.dtype)
        rows, columns = weight.shape
        choice = choose_dense(rows, columns, self.target, self.kernels, placed)
        self._use_linear(name, None, choice)
        return self.prepared.keep(modules, choice.kernel.layout, choice.kernel.prepare(placed, bias), bias)

    def _choose(self, scheme: Scheme, in_features: int) -> Choice[LinearKernel[Any]]:
        return choose_linear(scheme, in_features, self.target, self.kernels, self.excluded, self.of_expert)
