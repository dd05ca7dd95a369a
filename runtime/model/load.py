"""From a checkpoint folder to a decoder: dense or packed, ours or another tool's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.device import resolve_device
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import LowRankWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from runtime.free_memory import available_bytes, format_bytes
from runtime.kernels.base import Linear, Target
from runtime.kernels.dense import choose_dense
from runtime.kernels.low_rank import LowRank
from runtime.kernels.outliers import WithOutliers
from runtime.kernels.registry import MODES, Choice, check_name, choose_kernel
from runtime.kernels.semi_structured import NAME as SEMI_STRUCTURED
from runtime.kernels.semi_structured import SemiStructuredLinear, choose_semi_structured
from runtime.model.config import DecoderConfig, parse_config, read_generation_config
from runtime.model.decoder import Decoder, Layer
from runtime.model.device_files import unpacked_on, unpacks_anywhere
from runtime.model.embedding import Embedding, make_embedding
from runtime.model.linear import SideBySide, Weight, fuse_biases, fuse_weights
from runtime.model.ops_native import choose_ops
from runtime.model.rope import Rotary
from runtime.model.target import resolve_dtype
from runtime.model.tensors import EMBEDDING, HEAD, NORM, check_tensors, head_is_embedding


def load_model(path: str | Path, *, device: str = "auto", dtype: str = "auto", kernels: str = "auto") -> Decoder:
    """Opens a checkpoint and prepares every weight for its kernel.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: of activations and keys and values; `auto` is the checkpoint's, except that CPUs without 16-bit
            arithmetic of that kind compute float16 as bfloat16 and bfloat16 as float32.
        kernels: `auto`, or the name of one kernel; `reference` is plain torch everywhere.

    Raises:
        CheckpointError: a folder that cannot be read, an architecture that is not supported, missing or misshapen
            tensors. All of it is checked before weights are read.
        ToolkitError: a device, dtype or kernel that is not there.
    """
    check_name(kernels)
    checkpoint = PackedCheckpoint.open(path)
    config = parse_config(checkpoint.config, read_generation_config(checkpoint.path))
    chosen_device = resolve_device(device)
    target = Target(chosen_device, resolve_dtype(dtype, config.dtype, chosen_device))
    check_tensors(checkpoint, config)
    excluded = exclude_kernels(checkpoint, target, kernels, available_bytes(chosen_device))
    return _Loader(checkpoint, config, target, kernels, excluded).load()


def load_layers(checkpoint: PackedCheckpoint, model: Decoder, kernels: str = "auto") -> tuple[list[Layer], list[str]]:
    """The layers of a model from another form of its checkpoint, and which kernel serves what."""
    target = Target(model.device, model.dtype)
    excluded = exclude_kernels(checkpoint, target, kernels, available_bytes(model.device))
    loader = _Loader(checkpoint, model.config, target, kernels, excluded)
    return loader.layers(), loader.description()


@dataclass
class _Loader:
    """Builds a decoder; counts which kernel serves what on the way."""

    checkpoint: PackedCheckpoint
    config: DecoderConfig
    target: Target
    kernels: str
    excluded: dict[str, str]
    used: Counter[str] = field(default_factory=Counter)

    def load(self) -> Decoder:
        config, target = self.config, self.target
        ops, ops_reason = choose_ops(config, target.dtype, target.device, self.kernels)
        layers = self.layers()
        embedding, head = self._ends()
        return Decoder(
            config=config,
            dtype=target.dtype,
            device=target.device,
            embedding=embedding,
            layers=layers,
            norm=self._vector(f"{NORM}.weight"),
            head=head,
            rotary=Rotary(config.rope, config.head_dim, target.dtype, target.device),
            ops=ops,
            description=(*self.description(), f"ops between linears: {type(ops).__name__} ({ops_reason})"),
        )

    def layers(self) -> list[Layer]:
        return [self._layer(f"model.layers.{index}") for index in range(self.config.num_layers)]

    def description(self) -> list[str]:
        return [f"{count} x {what}" for what, count in self.used.items()]

    def _layer(self, name: str) -> Layer:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return Layer(
            attention_norm=self._vector(f"{name}.input_layernorm.weight"),
            qkv=self._linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            head_norm=self._head_norm(attention) if self.config.qk_norm else None,
            output=self._linear(f"{attention}.o_proj"),
            mlp_norm=self._vector(f"{name}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._linear(f"{mlp}.down_proj"),
        )

    def _head_norm(self, attention: str) -> Tensor:
        query, key = self._vector(f"{attention}.q_norm.weight"), self._vector(f"{attention}.k_norm.weight")
        return torch.cat((query.expand(self.config.num_heads, -1), key.expand(self.config.num_kv_heads, -1)))

    def _ends(self) -> tuple[Embedding, Linear]:
        """Embedding and head, with one matrix for both where that is possible."""
        weight = self._weight(EMBEDDING)
        if not isinstance(weight, IntegerWeight | Tensor):
            raise CheckpointError(f"{EMBEDDING} is stored as {weight.scheme}", "Pack embeddings as plain integers")
        if not head_is_embedding(self.checkpoint):
            return make_embedding(weight, self.target), self._linear(HEAD)
        head = self._prepare(weight, "head (the embedding)")
        return make_embedding(weight, self.target, head), head

    def _weight(self, module: str) -> Weight:
        """A weight as stored; plain integers on the device."""
        device = self.target.device
        # A checkpoint that makes its weights itself (`RoundedCheckpoint`) reads more than one matrix for each.
        is_read = type(self.checkpoint) is PackedCheckpoint
        if device.type == "cpu" or not is_read or not unpacks_anywhere(self.checkpoint.scheme(module)):
            return self.checkpoint.weight(module)
        weight = unpacked_on(self.checkpoint, device).weight(module)
        return weight.changed(lambda tensor: tensor.to(device)) if isinstance(weight, IntegerWeight) else weight

    def _vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.target.device, self.target.dtype)

    def _linear(self, *modules: str) -> Linear:
        """One linear out of several over the same input, fused when they can be."""
        weights = [self._weight(module) for module in modules]
        biases = [self._bias(module) for module in modules]
        fused = fuse_weights(weights)
        name = "+".join(module.rpartition(".")[2] for module in modules)
        if fused is None:
            parts = zip(weights, biases, modules, strict=True)
            return SideBySide(tuple(self._prepare(w, m.rpartition(".")[2], b) for w, b, m in parts))
        return self._prepare(fused, name, fuse_biases(biases, [weight.shape[0] for weight in weights]))

    def _bias(self, module: str) -> Tensor | None:
        return self._vector(f"{module}.bias") if f"{module}.bias" in self.checkpoint.files else None

    def _prepare(self, weight: Weight, name: str, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, LowRankWeight):
            right = self._prepare(weight.right, f"{name}, right factor")
            return LowRank(right, self._prepare(weight.left, f"{name}, left factor", bias))
        if isinstance(weight, OutlierWeight):
            columns = weight.columns.to(self.target.device, torch.int64)
            values = weight.values.to(self.target.device, self.target.dtype).T.contiguous()
            what = f"{name} beside {weight.scheme.outliers} columns in 16 bits"
            return WithOutliers(self._prepare(weight.base, what, bias), columns, values)
        if isinstance(weight, Tensor):
            return self._prepare_dense(weight, name, bias)
        choice = self._choose(weight.scheme, weight.shape[1])
        self.used[f"{name}: {weight.scheme}, kernel {choice.kernel.name} ({choice.reason})"] += 1
        return choice.kernel.prepare(weight, bias, self.target)

    def _prepare_dense(self, weight: Tensor, name: str, bias: Tensor | None) -> Linear:
        dtype = str(self.target.dtype).removeprefix("torch.")
        sparse = choose_semi_structured(weight, self.target, self.kernels)
        placed = weight.to(self.target.device, self.target.dtype)
        if sparse.serves:
            self.used[f"{name}: 2:4 {dtype}, kernel {SEMI_STRUCTURED} ({sparse.reason})"] += 1
            return SemiStructuredLinear(placed, bias)
        dense = choose_dense(weight.shape[1], self.target, reference=self.kernels == "reference")
        reason = "; ".join(filter(None, (dense.reason, sparse.reason)))
        self.used[f"{name}: dense {dtype}, kernel {dense.kernel.name} ({reason})"] += 1
        return dense.kernel.prepare(placed, bias)

    def _choose(self, scheme: Scheme, in_features: int) -> Choice:
        return choose_kernel(scheme, in_features, self.target, self.kernels, self.excluded)


def exclude_kernels(checkpoint: PackedCheckpoint, target: Target, kernels: str, free: int) -> dict[str, str]:
    """Kernels that may not be chosen for a checkpoint, with the reason.

    Weights are dequantized at load only while their dense form takes at most half of the `free` bytes.
    """
    elements = 0
    looked_up = set() if head_is_embedding(checkpoint) else {EMBEDDING}
    for module in sorted(set(checkpoint.modules) - looked_up):
        for scheme, rows, columns in checkpoint.schemes[module].matrices(*checkpoint.shape(module)):
            if scheme and choose_kernel(scheme, columns, target, kernels).kernel.name == "dequantized":
                elements += rows * columns
    needed, limit = elements * target.dtype.itemsize, free // 2
    if needed > limit and kernels in MODES:
        return {"dequantized": f"would need {format_bytes(needed)} of {format_bytes(limit)} allowed"}
    return {}
