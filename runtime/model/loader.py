"""From a checkpoint folder to a decoder: dense or packed, ours or another tool's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.dequantized import UNUSED_SCALES, dequantized
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import BesideColumns, Factors
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.device import available_bytes, format_bytes, resolve_device
from compress.common.errors import CheckpointError, ToolkitError
from compress.models.block_parts import Beside, LayerInput
from compress.models.generic import CodeSpec
from compress.models.latent import Latent
from compress.models.recurrent import HEAD_VECTORS, GatedDeltaNet, Mamba2, Recurrent, ShortConv
from compress.models.registry import find_family
from compress.models.spec import CURVE, MLP, Attention, Block, Mixture, Norm
from compress.models.spec import Linear as LinearSpec
from runtime.backends.base import Linear, LinearKernel, NormWeights, Target
from runtime.backends.composed import LowRank, WithOutliers
from runtime.backends.fused_layers import fuses_head_norms
from runtime.backends.registry import (
    Choice,
    check_name,
    choose_delta_step,
    choose_dense,
    choose_linear,
    choose_mixture,
    choose_ops,
    is_fast,
    linear_kernels,
    modes,
)
from runtime.core.model_config import DecoderConfig, parse_config, read_generation_config
from runtime.model.decoder import BesideWeights, Decoder, Layer, LayerInputWeights, RecurrentLayer
from runtime.model.device_files import unpacked_on, unpacks_anywhere
from runtime.model.embedding import Embedding, LayerInputsWeights, make_embedding
from runtime.model.expected_tensors import check_tensors, head_is_embedding
from runtime.model.expert_offload import NO_OFFLOAD, ExpertOffload
from runtime.model.mixers.causal_conv import ConvLayer
from runtime.model.mixers.gated_delta_net import DeltaNet
from runtime.model.mixers.latent import LatentWeights, split_expansion
from runtime.model.mixers.mamba2 import Mamba2Layer
from runtime.model.mixture import Expert, Experts
from runtime.model.rotary import Rotary, channel_order
from runtime.model.served import ServedModel
from runtime.model.side_by_side import SideBySide, fuse_biases, fuse_weights
from runtime.model.xielu import Xielu

DTYPES = ("bfloat16", "float16", "float32", "float64")


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Chooses the activation dtype. Raises ToolkitError for an unknown one, or one without a fast path on this CPU."""
    if name != "auto" and name not in DTYPES:
        raise ToolkitError(f"unknown dtype {name!r}", f"Choose auto, {', '.join(DTYPES)}")
    wanted = getattr(torch, checkpoint_dtype if name == "auto" else name)
    if device.type != "cpu" or is_fast(wanted):
        return wanted
    if name != "auto":
        raise ToolkitError(f"{name} has no fast path on this CPU (over ten times slower)", "Use --dtype auto")
    return torch.bfloat16 if is_fast(torch.bfloat16) else torch.float32


def load_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kernels: str = "auto",
    as_dense: bool = False,
    trust_remote_code: bool = False,
    moe_expert_cache: int | None = None,
) -> ServedModel:
    """Opens a checkpoint and prepares every weight for its kernel.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: of activations and keys and values; `auto` is the checkpoint's, except that CPUs without 16-bit
            arithmetic in it compute float16 as bfloat16 and bfloat16 as float32.
        kernels: `auto`, or the name of one kernel; `reference` is plain torch everywhere.
        as_dense: dequantizes packed weights to the checkpoint's dtype, and rounds no inputs.
        trust_remote_code: whether Python files of the folder may run.
        moe_expert_cache: experts of each mixture on the device, with all of them in host memory.

    Raises:
        CheckpointError: a folder that cannot be read, an architecture that is not supported, missing or misshapen
            tensors. All of it is checked before weights are read.
        ToolkitError: a device, dtype or kernel that does not exist, or a cache of experts that is of no use.
    """
    check_name(kernels)
    checkpoint = PackedCheckpoint.open(path)
    checkpoint = dequantized(checkpoint) if as_dense else checkpoint
    config = read_model(checkpoint, trust_remote_code)
    chosen_device = resolve_device(device)
    target = Target(chosen_device, resolve_dtype(dtype, config.dtype, chosen_device))
    excluded = exclude_kernels(checkpoint, config, target, kernels, available_bytes(chosen_device))
    offload = ExpertOffload.of(checkpoint.path, config.spec, moe_expert_cache, chosen_device)
    loader = _Loader(checkpoint, config, target, kernels, excluded, offload)
    if not isinstance(config.spec, CodeSpec):
        return loader.load()
    from runtime.model.code_decoder import CodeSource

    decoder = CodeSource(checkpoint, config, target, loader.prepare, trust_remote_code).load()
    decoder.description = tuple(loader.description())
    return decoder


def read_model(checkpoint: PackedCheckpoint, trust_remote_code: bool = False) -> DecoderConfig:
    """Describes the model of a checkpoint and checks its tensors. One whose family is not registered is served by
    modeling code of transformers, or of its folder where that is trusted.

    Raises:
        CheckpointError: see `load_model`.
    """
    generation = read_generation_config(checkpoint.path)
    if find_family(checkpoint.config.get("model_type")) is None:
        from runtime.model.code_probe import describe_code

        return parse_config(checkpoint.config, generation, describe_code(checkpoint, trust_remote_code))
    config = parse_config(checkpoint.config, generation)
    check_tensors(checkpoint, config)
    return config


def load_layers(checkpoint: PackedCheckpoint, model: Decoder, kernels: str = "auto") -> tuple[list[Layer], list[str]]:
    """Loads the layers of a model from another form of its checkpoint; also returns the lines of its description."""
    target = Target(model.device, model.dtype)
    excluded = exclude_kernels(checkpoint, model.config, target, kernels, available_bytes(model.device))
    loader = _Loader(checkpoint, model.config, target, kernels, excluded)
    return loader.layers(), loader.description()


@dataclass
class _Loader:
    """Builds a decoder and counts the kernels in use."""

    checkpoint: PackedCheckpoint
    config: DecoderConfig
    target: Target
    kernels: str
    excluded: dict[str, str]
    offload: ExpertOffload = NO_OFFLOAD
    used: Counter[str] = field(default_factory=Counter)

    def load(self) -> Decoder:
        config, target = self.config, self.target
        ops = choose_ops(config, target, self.kernels)
        layers = self.layers()
        embedding, head = self._ends()
        return Decoder(
            config=config,
            dtype=target.dtype,
            device=target.device,
            embedding=embedding,
            layers=layers,
            norm=self._norm(config.spec.final_norm),
            head=head,
            rotaries=self.rotaries,
            ops=ops.kernel,
            layer_inputs=self._layer_inputs(),
            description=(
                *self.description(),
                f"ops between linears: {type(ops.kernel).__name__} ({ops.reason})",
                *contradictions(self.checkpoint, config),
            ),
        )

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        target = self.target
        return tuple(Rotary(*rotation, target.dtype, target.device) for rotation in self.config.spec.rotations)

    def layers(self) -> list[Layer]:
        spec = self.config.spec
        return [self._layer(spec.block_name(index), block) for index, block in enumerate(spec.blocks)]

    def description(self) -> list[str]:
        return [f"{count} x {what}" for what, count in self.used.items()]

    def _layer(self, name: str, block: Block) -> Layer:
        layer = Layer(
            attention_norm=self._block_norm(name, block.input_norm),
            qkv=None,
            head_norm=None,
            output=None,
            mlp_norm=self._block_norm(name, block.mlp_norm),
            gate_up=None,
            down=None,
            output_norm=self._block_norm(name, block.output_norm),
            mlp_output_norm=self._block_norm(name, block.mlp_output_norm),
            rope=None,
        )
        if isinstance(block.mixer, Attention):
            layer = self._with_attention(name, layer, block.mixer)
        else:
            layer = replace(layer, recurrent=self._recurrent(name, block.mixer))
        if block.second is not None:
            layer = replace(layer, recurrent=self._recurrent(name, block.second.mixer))
        layer = self._with_mlp(name, layer, block.mlp)
        return replace(
            layer,
            beside=None if block.beside is None else self._beside(name, block.beside),
            input=None if block.layer_input is None else self._layer_input(name, block.layer_input),
            scalar=self._vector(f"{name}.{block.scalar}") if block.scalar else None,
        )

    def _with_mlp(self, name: str, layer: Layer, mlp: MLP | Mixture) -> Layer:
        if isinstance(mlp, Mixture):
            return replace(layer, experts=self._experts(name, mlp))
        expert, curve = self._expert(name, mlp), self._curve(f"{name}.{mlp.curve}") if mlp.curve else None
        return replace(layer, gate_up=expert.gate_up, down=expert.down, curve=curve)

    def _with_attention(self, name: str, layer: Layer, mixer: Attention) -> Layer:
        fused = fuses_head_norms(mixer) and mixer.rope is not None
        return replace(
            layer,
            qkv=self._linear(*_inside(name, mixer.qkv)),
            output=self._linear(*_inside(name, (mixer.output,))),
            head_norm=self._head_norm(name, mixer) if fused else None,
            qk_norm=None if fused else self._qk_norm(name, mixer),
            rope=None if mixer.rotation is None else self.config.spec.rotations.index(mixer.rotation),
            value_norm=self._block_norm(name, mixer.value_norm),
            sink_logits=self._vector(f"{name}.{mixer.sink_logits}") if mixer.sink_logits else None,
            latent=self._latent(name, mixer, mixer.latent) if mixer.latent is not None else None,
        )

    def _latent(self, name: str, mixer: Attention, latent: Latent) -> LatentWeights:
        """Loads what is between the projections; the expansion is dequantized here to be split."""
        weight = self._weight(f"{name}.{latent.expansion.name}")
        form = "dense" if isinstance(weight, Tensor) else f"{weight.scheme}, dequantized"
        self.used[f"{latent.expansion.name.rpartition('.')[2]}: {form}, split by heads at load"] += 1
        dense = weight if isinstance(weight, Tensor) else weight.dequantize(self.target.dtype)
        dense = dense.to(self.target.device, self.target.dtype)
        scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        return LatentWeights(
            split_expansion(dense, latent, mixer.num_heads, scale),
            latent.rotated,
            self._norm(replace(latent.norm, name=f"{name}.{latent.norm.name}")),
            self._block_norm(name, latent.query_norm),
            None if latent.query is None else self._linear(*_inside(name, (latent.query,))),
        )

    def _recurrent(self, name: str, mixer: Recurrent) -> RecurrentLayer:
        if isinstance(mixer, Mamba2):
            return self._mamba2(name, mixer)
        return self._short_conv(name, mixer) if isinstance(mixer, ShortConv) else self._delta_net(name, mixer)

    def _mamba2(self, name: str, mixer: Mamba2) -> Mamba2Layer:
        wide = torch.promote_types(self.target.dtype, torch.float32)
        decay, skip, dt_bias = (self._vector(f"{name}.{mixer.name}.{part}", wide) for part in HEAD_VECTORS)
        return Mamba2Layer(
            mixer,
            inputs=self._linear(*_inside(name, mixer.qkv)),
            output=self._linear(*_inside(name, (mixer.output,))),
            conv=self._vector(f"{name}.{mixer.conv}", wide).squeeze(1).T.contiguous(),
            conv_bias=self._vector(f"{name}.{mixer.bias}", wide) if mixer.bias else None,
            decay=-decay.exp(),
            dt_bias=dt_bias,
            skip=skip,
            norm=self._block_norm(name, mixer.norm),
            factors=self._factors(mixer),
        )

    def _factors(self, mixer: Mamba2) -> Tensor | None:
        if not mixer.factors:
            return None
        parts = [torch.full((size,), factor) for size, factor in zip(mixer.sizes, mixer.factors, strict=True)]
        return torch.cat(parts).to(self.target.device, self.target.dtype)

    def _short_conv(self, name: str, mixer: ShortConv) -> ConvLayer:
        wide = torch.promote_types(self.target.dtype, torch.float32)
        return ConvLayer(
            self._linear(*_inside(name, mixer.qkv)),
            self._linear(*_inside(name, (mixer.output,))),
            self._vector(f"{name}.{mixer.conv}", wide).squeeze(1).T.contiguous(),
            self._vector(f"{name}.{mixer.bias}", wide) if mixer.bias else None,
        )

    def _delta_net(self, name: str, mixer: GatedDeltaNet) -> DeltaNet:
        wide, part = torch.promote_types(self.target.dtype, torch.float32), f"{name}.{mixer.name}"
        choice = choose_delta_step(mixer, self.target, self.kernels)
        self.used[f"gated delta rule, one token of each sequence: {choice.reason}"] += 1
        return DeltaNet(
            mixer,
            inputs=self._linear(*_inside(name, mixer.qkv)),
            gates=self._linear(*_inside(name, mixer.gates)),
            output=self._linear(*_inside(name, (mixer.output,))),
            conv=self._vector(f"{name}.{mixer.conv}", wide).squeeze(1).T.contiguous(),
            decay=-self._vector(f"{part}.A_log", wide).exp(),
            dt_bias=self._vector(f"{part}.dt_bias"),
            norm=self._norm(replace(mixer.norm, name=f"{name}.{mixer.norm.name}")),
            step=choice.kernel,
        )

    def _beside(self, name: str, part: Beside) -> BesideWeights:
        norms = (self._norm(replace(norm, name=f"{name}.{norm.name}")) for norm in part.norms)
        return BesideWeights(self._experts(name, part.mixture), *norms)

    def _layer_input(self, name: str, part: LayerInput) -> LayerInputWeights:
        gate, output = (self._linear(*_inside(name, (linear,))) for linear in (part.gate, part.output))
        return LayerInputWeights(gate, output, self._norm(replace(part.norm, name=f"{name}.{part.norm.name}")))

    def _layer_inputs(self) -> LayerInputsWeights | None:
        inputs = self.config.spec.layer_inputs
        if inputs is None:
            return None
        embedding = make_embedding(self._looked_up(inputs.embedding), self.target)
        return LayerInputsWeights(embedding, self._linear(inputs.projection), self._norm(inputs.norm))

    def _expert(self, name: str, mlp: MLP) -> Expert:
        return Expert(self._linear(*_inside(name, mlp.inputs)), self._linear(*_inside(name, (mlp.down,))))

    def _curve(self, name: str) -> Xielu:
        return Xielu(**{part: self._vector(f"{name}.{part}") for part in CURVE})

    def _experts(self, name: str, mixture: Mixture) -> Experts:
        router, wide = mixture.router, torch.promote_types(self.target.dtype, torch.float32)
        gate = mixture.shared_gate
        scores = self._vector(f"{name}.{router.scores.name}.weight", wide if router.in_float32 else None)
        experts = Experts(
            router,
            scores,
            tuple(self.offload.expert(self._expert(name, mlp), len(mixture.experts)) for mlp in mixture.experts),
            self._vector(f"{name}.{router.bias}", wide).flatten() if router.bias else None,
            None if mixture.shared is None else self._expert(name, mixture.shared),
            None if gate is None else self._vector(f"{name}.{gate.name}.weight"),
            self._vector(f"{name}.{router.expert_scales}") if router.expert_scales else None,
            scores_bias=self._vector(f"{name}.{router.scores.name}.bias", scores.dtype) if router.scores.bias else None,
        )
        experts = replace(experts, slots=self.offload.slots(name, experts.experts))
        choice = choose_mixture(mixture, experts, self.target, self.kernels)
        where = self.offload.describe(name, len(mixture.experts))
        self.used[f"mixture, {router.num_chosen} of {len(mixture.experts)} experts: {choice.reason}{where}"] += 1
        return replace(experts, kernel=choice.kernel)

    def _norm(self, norm: Norm) -> NormWeights:
        """Loads a norm by its absolute name."""
        dtype = self.target.dtype
        if norm.in_float32 or norm.offset or norm.centered:
            dtype = torch.promote_types(dtype, torch.float32)
        name, device = norm.tensor, self.target.device
        weight = self._vector(name, dtype) if norm.has_weight else torch.ones(norm.size, dtype=dtype, device=device)
        bias = self._vector(f"{norm.name}.bias", dtype) if norm.bias else None
        return NormWeights(
            weight + norm.offset if norm.offset else weight, norm.eps, bias, norm.centered, norm.is_plain
        )

    def _block_norm(self, block: str, norm: Norm | None) -> NormWeights | None:
        return None if norm is None else self._norm(replace(norm, name=f"{block}.{norm.name}"))

    def _head_norm(self, name: str, mixer: Attention) -> Tensor | None:
        if mixer.qk_norm is None:
            return None
        weights = (self._vector(f"{name}.{norm.name}.weight") for norm in mixer.qk_norm)
        heads = (mixer.num_heads, mixer.own_kv_heads)
        weight = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, heads, strict=False)])
        order = None if mixer.rope is None else channel_order(mixer.rope, mixer.head_dim)
        return weight if order is None else weight[:, order.to(weight.device)]

    def _qk_norm(self, name: str, mixer: Attention) -> tuple[NormWeights, ...] | None:
        if mixer.qk_norm is None:
            return None
        return tuple(self._norm(replace(norm, name=f"{name}.{norm.name}")) for norm in mixer.qk_norm)

    def _ends(self) -> tuple[Embedding, Linear]:
        """Prepares embedding and head, with one matrix for both where possible."""
        names = self.config.spec.names
        weight = self._looked_up(names.embedding)
        if not head_is_embedding(self.checkpoint, self.config):
            return make_embedding(weight, self.target), self._linear(self.config.spec.head)
        bias = self._vector(f"{names.head}.bias") if self.config.spec.head_bias else None
        head = self._prepare(weight, "head (the embedding)", bias)
        return make_embedding(weight, self.target, head), head

    def _looked_up(self, embedding: str) -> IntegerWeight | Tensor:
        """Reads a weight whose rows are looked up. Raises CheckpointError for a form that has none."""
        weight = self._weight(embedding)
        if not isinstance(weight, IntegerWeight | Tensor):
            raise CheckpointError(f"{embedding} is stored as {weight.scheme}", "Pack embeddings as plain integers")
        return weight

    def _weight(self, module: str) -> Weight | Tensor:
        """Reads a weight as stored; plain integers are unpacked on the device."""
        device = self.target.device
        # A checkpoint that makes its weights itself (`RoundedCheckpoint`) reads more than one matrix for each.
        is_read = type(self.checkpoint) is PackedCheckpoint
        if device.type == "cpu" or not is_read or not unpacks_anywhere(self.checkpoint.scheme(module)):
            return self.checkpoint.weight(module)
        return unpacked_on(self.checkpoint, device).weight(module).to(device)

    def _vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.checkpoint.tensor(name).to(self.target.device, dtype or self.target.dtype)

    def _linear(self, *linears: LinearSpec) -> Linear:
        """Makes one linear of several over one input, fused when they can be."""
        weights = [self._weight(linear.name) for linear in linears]
        names = [linear.name.rpartition(".")[2] for linear in linears]
        biases = [self._vector(f"{linear.name}.bias") if linear.bias else None for linear in linears]
        fused = fuse_weights(weights)
        if fused is None:
            parts = zip(weights, names, biases, strict=True)
            return SideBySide(tuple(self._prepare(weight, name, bias) for weight, name, bias in parts))
        return self._prepare(fused, "+".join(names), fuse_biases(biases, [weight.shape[0] for weight in weights]))

    def prepare(self, module: str, weight: Tensor | None, bias: Tensor | None) -> Linear:
        """Makes one linear from its dense weight, or from the packed one of its name."""
        return self._prepare(self._weight(module) if weight is None else weight, module.rpartition(".")[2], bias)

    def _prepare(self, weight: Weight | Tensor, name: str, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Tensor):
            return self._prepare_dense(weight, name, bias)
        product = weight.product()
        if isinstance(product, Factors):
            right = self._prepare(product.right, f"{name}, right factor")
            return LowRank(right, self._prepare(product.left, f"{name}, left factor", bias))
        if isinstance(product, BesideColumns):
            columns = product.columns.to(self.target.device, torch.int64)
            values = product.values.to(self.target.device, self.target.dtype).T.contiguous()
            beside = f"{name} beside {len(columns)} columns in 16 bits"
            return WithOutliers(self._prepare(product.base, beside, bias), columns, values)
        choice = self._choose(weight.scheme, weight.shape[1])
        self.used[f"{name}: {weight.scheme}, kernel {choice.kernel.name} ({choice.reason})"] += 1
        return choice.kernel.prepare(weight.expanded(), bias, self.target)

    def _prepare_dense(self, weight: Tensor, name: str, bias: Tensor | None) -> Linear:
        dtype = str(self.target.dtype).removeprefix("torch.")
        placed = weight.to(self.target.device, self.target.dtype)
        rows, columns = weight.shape
        choice = choose_dense(rows, columns, self.target, self.kernels, placed)
        self.used[f"{name}: dense {dtype}, kernel {choice.kernel.name} ({choice.reason})"] += 1
        return choice.kernel.prepare(placed, bias)

    def _choose(self, scheme: Scheme, in_features: int) -> Choice[LinearKernel[Any]]:
        return choose_linear(scheme, in_features, self.target, self.kernels, self.excluded)


def _inside(block: str, linears: Sequence[LinearSpec]) -> list[LinearSpec]:
    """The linears of a block with absolute names."""
    return [replace(linear, name=f"{block}.{linear.name}") for linear in linears]


def contradictions(checkpoint: PackedCheckpoint, config: DecoderConfig) -> Iterator[str]:
    """Yields a line for everything in which the files contradict config.json and transformers' reading is followed."""
    silent = [f"{linear.name}.bias" for linear in (*config.spec.linears(), config.spec.head) if not linear.bias]
    if ignored := [name for name in silent if name in checkpoint.files]:
        yield f"ignored: {len(ignored)} biases that config.json does not announce, e.g. {ignored[0]}"
    if unused := [name for name in checkpoint.files.names() if name.endswith(UNUSED_SCALES)]:
        yield f"ignored: {len(unused)} measured scales of inputs, keys or values, e.g. {unused[0]}"
    if config.spec.tied and not checkpoint.tied:
        yield (
            f"head: {config.spec.names.head}.weight, which differs from the embedding although config.json has "
            "tie_word_embeddings=true"
        )


def exclude_kernels(
    checkpoint: PackedCheckpoint, config: DecoderConfig, target: Target, kernels: str, free: int
) -> dict[str, str]:
    """Returns kernels that may not be chosen for a checkpoint, with the reason.

    Weights are dequantized at load only while their dense form takes at most half of the `free` bytes.
    """
    elements = 0
    looked_up = set(config.spec.embeddings)
    if head_is_embedding(checkpoint, config):
        looked_up.remove(config.spec.names.embedding)
    for module in sorted(set(checkpoint.modules) - looked_up):
        for scheme, rows, columns in checkpoint.schemes[module].matrices(*checkpoint.shape(module)):
            if scheme and choose_linear(scheme, columns, target, kernels).kernel.is_dense:
                elements += rows * columns
    needed, limit = elements * target.dtype.itemsize, free // 2
    if needed > limit and kernels in modes():
        reason = f"would need {format_bytes(needed)} of {format_bytes(limit)} allowed"
        return {kernel.name: reason for kernel in linear_kernels() if kernel.is_dense}
    return {}
