"""From a checkpoint folder to a decoder: dense or packed, ours or another tool's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.dequantized import UNUSED_SCALES, dequantized
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme
from compress.common.device import available_bytes, format_bytes, resolve_device
from compress.common.errors import ToolkitError
from compress.models.block_parts import Beside, LayerInput
from compress.models.generic import CodeSpec
from compress.models.mixers.attention import Attention
from compress.models.mlp import CURVE, MLP, Mixture
from compress.models.registry import find_family
from runtime.backends.base import Linear, RowSource, Target
from runtime.backends.fused_layers import fuses_head_norms
from runtime.backends.registry import (
    check_name,
    choose_linear,
    choose_mixture,
    choose_ops,
    is_fast,
    linear_kernels,
    modes,
)
from runtime.core.model_config import DecoderConfig, parse_config, read_generation_config
from runtime.core.progress import Report, Stage, ignore
from runtime.model.decoder import BesideWeights, Decoder, Layer, LayerInputWeights
from runtime.model.device_files import reader_for
from runtime.model.embedding import Embedding, LayerInputsWeights, SharedEmbedding, make_embedding
from runtime.model.expected_tensors import check_tensors, head_is_embedding
from runtime.model.expert_offload import NO_OFFLOAD, ExpertOffload
from runtime.model.mixers.latent import load_latent
from runtime.model.mixers.registry import load_recurrent
from runtime.model.mixture import Expert, Experts
from runtime.model.prepared import NOTHING_PREPARED, NoPrepared, find_prepared
from runtime.model.prepared_key import CPU, CUDA
from runtime.model.rotary import Rotary, channel_order
from runtime.model.served import ServedModel
from runtime.model.weight_reader import WeightReader
from runtime.model.xielu import Xielu

DTYPES = ("bfloat16", "float16", "float32", "float64")


class Unloaded:
    """Stands in the place of an embedding or a linear that is not in memory."""

    nbytes = 0

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise ValueError("this part of the model is not loaded")


UNLOADED = Unloaded()
UNLOADED_LAYER = Layer(
    attention_norm=None, qkv=None, head_norm=None, output=None, mlp_norm=None, gate_up=None, down=None
)


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
    prepared: NoPrepared | None = None,
    notes: tuple[str, ...] = (),
    report: Report = ignore,
) -> ServedModel:
    """Opens a checkpoint and prepares every weight for its kernel.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: of activations and keys and values; `auto` is the checkpoint's, except that CPUs without 16-bit
            arithmetic in it compute float16 as bfloat16 and bfloat16 as float32.
        kernels: a mode or kernel of `runtime.backends.registry`; `reference` is plain torch everywhere.
        as_dense: dequantizes packed weights to the checkpoint's dtype, and rounds no inputs.
        trust_remote_code: whether Python files of the folder may run.
        moe_expert_cache: experts of each mixture on the device, with all of them in host memory.
        prepared: weights that need not be packed; None looks for those of `runtime prepare`.
        notes: lines for the description, about the choice of `kernels`.
        report: is told how many layers are read.

    Raises:
        CheckpointError: a folder that cannot be read, an architecture that is not supported, missing or misshapen
            tensors. All of it is checked before weights are read.
        ToolkitError: a device, dtype or kernel that does not exist, or a cache of experts that is of no use.
    """
    report(Stage.WEIGHTS, 0, 0)
    config, reader = open_weights(path, device, dtype, kernels, as_dense, trust_remote_code)
    checkpoint, target = reader.checkpoint, reader.target
    if prepared is None and target.device.type in (CPU, CUDA) and not as_dense:
        prepared = find_prepared(checkpoint.path, target.device.type, reader.device_reader)
    reader = replace(reader, prepared=prepared or NOTHING_PREPARED, notes=notes)
    offload = ExpertOffload.of(checkpoint.path, config.spec, moe_expert_cache, target.device)
    if not isinstance(config.spec, CodeSpec):
        return load_decoder(config, reader, offload, report)
    from runtime.model.code_decoder import CodeSource

    decoder = CodeSource(checkpoint, config, target, reader.prepare_module, trust_remote_code).load()
    decoder.description, decoder.linears = tuple(reader.description()), reader.linears
    return decoder


def open_weights(
    path: str | Path, device: str, dtype: str, kernels: str, as_dense: bool, trust_remote_code: bool
) -> tuple[DecoderConfig, WeightReader]:
    """Describes the model of a checkpoint, and what prepares its weights; reads none. See `load_model`."""
    check_name(kernels)
    checkpoint = PackedCheckpoint.open(path)
    checkpoint = dequantized(checkpoint) if as_dense else checkpoint
    config = read_model(checkpoint, trust_remote_code)
    chosen_device = resolve_device(device)
    target = Target(chosen_device, resolve_dtype(dtype, config.dtype, chosen_device))
    excluded = exclude_kernels(checkpoint, config, target, kernels, available_bytes(chosen_device))
    return config, WeightReader(checkpoint, target, kernels, excluded, device_reader=reader_for(chosen_device))


def load_decoder(
    config: DecoderConfig, reader: WeightReader, offload: ExpertOffload = NO_OFFLOAD, report: Report = ignore
) -> Decoder:
    """Prepares every weight of a model of a registered family."""
    return DecoderLoader(config, reader, offload, report).load()


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
    reader = WeightReader(checkpoint, target, kernels, excluded, device_reader=reader_for(model.device))
    return DecoderLoader(model.config, reader).layers(), reader.description()


@dataclass(frozen=True)
class DecoderLoader:
    """Builds a decoder, whole or in parts."""

    config: DecoderConfig
    reader: WeightReader
    offload: ExpertOffload = NO_OFFLOAD
    report: Report = ignore

    def load(self) -> Decoder:
        layers = self.layers()
        embedding, head = self._ends()
        frame, layer_inputs = self.frame(), self.layer_inputs()
        checkpoint = self.reader.checkpoint
        notes = (*checkpoint.files.notes(), *contradictions(checkpoint, self.config))
        description = (*self.reader.description(), *frame.description, *notes)
        parts: dict[str, Any] = {"embedding": embedding, "layers": layers, "head": head, "layer_inputs": layer_inputs}
        return replace(frame, **parts, description=description, linears=self.reader.linears)

    def frame(self) -> Decoder:
        """Returns what is small: norm and rotary embeddings, with `UNLOADED` in the place of embedding, layers and
        head."""
        config, reader, target = self.config, self.reader, self.reader.target
        ops = choose_ops(config, target, reader.kernels)
        return Decoder(
            config=config,
            dtype=target.dtype,
            device=target.device,
            embedding=UNLOADED,
            layers=[UNLOADED_LAYER] * len(config.spec.blocks),
            norm=reader.norm(config.spec.final_norm),
            head=UNLOADED,
            rotaries=tuple(Rotary(*rotation, target.dtype, target.device) for rotation in config.spec.rotations),
            ops=ops.kernel,
            description=(f"ops between linears: {type(ops.kernel).__name__} ({ops.shown})",),
        )

    def layers(self) -> list[Layer]:
        layers, total = list[Layer](), len(self.config.spec.blocks)
        for index in range(total):
            self.report(Stage.WEIGHTS, index, total)
            layers.append(self.layer(index))
            self.reader.checkpoint.files.release()  # what was packed is not read again
        return layers

    def layer(self, index: int) -> Layer:
        """Prepares the weights of one layer."""
        name, block = self.config.spec.block_name(index), self.config.spec.blocks[index]
        reader = self.reader.inside(name)
        layer = Layer(
            attention_norm=reader.optional_norm(block.input_norm),
            qkv=None,
            head_norm=None,
            output=None,
            mlp_norm=reader.optional_norm(block.mlp_norm),
            gate_up=None,
            down=None,
            output_norm=reader.optional_norm(block.output_norm),
            mlp_output_norm=reader.optional_norm(block.mlp_output_norm),
            rope=None,
        )
        for mixer in block.mixers:
            if isinstance(mixer, Attention):
                layer = self._with_attention(layer, mixer, reader)
            else:
                layer = replace(layer, recurrent=load_recurrent(mixer, reader))
        layer = layer if block.mlp is None else self._with_mlp(layer, name, block.mlp, reader)
        return replace(
            layer,
            beside=None if block.beside is None else self._beside(name, block.beside, reader),
            input=None if block.layer_input is None else _layer_input(block.layer_input, reader),
            scalar=reader.vector(block.scalar) if block.scalar else None,
        )

    def _with_mlp(self, layer: Layer, name: str, mlp: MLP | Mixture, reader: WeightReader) -> Layer:
        if isinstance(mlp, Mixture):
            return replace(layer, experts=self._experts(name, mlp, reader))
        expert, curve = _expert(mlp, reader), _curve(mlp.curve, reader) if mlp.curve else None
        return replace(layer, gate_up=expert.gate_up, down=expert.down, curve=curve)

    def _with_attention(self, layer: Layer, mixer: Attention, reader: WeightReader) -> Layer:
        fused = fuses_head_norms(mixer) and mixer.rope is not None
        return replace(
            layer,
            qkv=reader.linear(*mixer.qkv),
            output=reader.linear(mixer.output),
            head_norm=_head_norm(mixer, reader) if fused else None,
            qk_norm=None if fused or mixer.qk_norm is None else tuple(reader.norm(norm) for norm in mixer.qk_norm),
            rope=None if mixer.rotation is None else self.config.spec.rotations.index(mixer.rotation),
            value_norm=reader.optional_norm(mixer.value_norm),
            sink_logits=reader.vector(mixer.sink_logits) if mixer.sink_logits else None,
            head_gate=None if mixer.head_gate is None else reader.linear(mixer.head_gate),
            latent=None if mixer.latent is None else load_latent(mixer, mixer.latent, reader),
        )

    def _beside(self, name: str, part: Beside, reader: WeightReader) -> BesideWeights:
        return BesideWeights(self._experts(name, part.mixture, reader), *(reader.norm(norm) for norm in part.norms))

    def layer_inputs(self) -> LayerInputsWeights | None:
        """Prepares what layers with an input of their own read; None for a model without such layers."""
        inputs, reader = self.config.spec.layer_inputs, self.reader
        if inputs is None:
            return None
        embedding = make_embedding(reader.rows(inputs.embedding), reader.target)
        return LayerInputsWeights(embedding, reader.linear(inputs.projection), reader.norm(inputs.norm))

    def _experts(self, name: str, mixture: Mixture, reader: WeightReader) -> Experts:
        router, gate, of_expert = mixture.router, mixture.shared_gate, replace(reader, of_expert=True)
        scores = reader.vector(f"{router.scores.name}.weight", reader.wide if router.in_float32 else None)
        experts = Experts(
            router,
            scores,
            tuple(self.offload.expert(_expert(mlp, of_expert), len(mixture.experts)) for mlp in mixture.experts),
            reader.vector(router.bias, reader.wide).flatten() if router.bias else None,
            None if mixture.shared is None else _expert(mixture.shared, reader),
            None if gate is None else reader.vector(f"{gate.name}.weight"),
            reader.vector(router.expert_scales) if router.expert_scales else None,
            scores_bias=reader.vector(f"{router.scores.name}.bias", scores.dtype) if router.scores.bias else None,
            around=tuple(reader.linear(linear) for linear in mixture.around),
        )
        experts = replace(experts, slots=self.offload.slots(name, experts.experts))
        choice = choose_mixture(mixture, experts, reader.target, reader.kernels)
        where = self.offload.describe(name, len(mixture.experts))
        reader.use(f"mixture, {router.num_chosen} of {len(mixture.experts)} experts", choice, where)
        return replace(experts, kernel=choice.kernel)

    def _ends(self) -> tuple[Embedding, Linear]:
        """Prepares embedding and head, with one matrix for both where possible."""
        head = self.head()
        if head_is_embedding(self.reader.checkpoint, self.config) and isinstance(head, RowSource) and head.reads_rows:
            return SharedEmbedding(head, self.reader.target.dtype), head
        return self.embedding(), head

    def embedding(self) -> Embedding:
        """Prepares the embedding alone."""
        return make_embedding(self.reader.rows(self.config.spec.names.embedding), self.reader.target)

    def head(self) -> Linear:
        """Prepares the output head alone."""
        reader, spec = self.reader, self.config.spec
        if not head_is_embedding(reader.checkpoint, self.config):
            return reader.linear(spec.head)
        bias = reader.vector(f"{spec.names.head}.bias") if spec.head_bias else None
        name, label = spec.names.embedding, "head (the embedding)"
        ready = reader.restore((name,), reader.checkpoint.shape(name), label, bias)
        return reader.prepare(reader.rows(name), label, bias, (name,)) if ready is None else ready


def _layer_input(part: LayerInput, reader: WeightReader) -> LayerInputWeights:
    return LayerInputWeights(reader.linear(part.gate), reader.linear(part.output), reader.norm(part.norm))


def _expert(mlp: MLP, reader: WeightReader) -> Expert:
    return Expert(reader.linear(*mlp.inputs), reader.linear(mlp.down))


def _curve(name: str, reader: WeightReader) -> Xielu:
    return Xielu(**{part: reader.vector(f"{name}.{part}") for part in CURVE})


def _head_norm(mixer: Attention, reader: WeightReader) -> Tensor | None:
    if mixer.qk_norm is None:
        return None
    weights = (reader.vector(f"{norm.name}.weight") for norm in mixer.qk_norm)
    heads = (mixer.num_heads, mixer.own_kv_heads)
    weight = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, heads, strict=False)])
    order = None if mixer.rope is None else channel_order(mixer.rope, mixer.head_dim)
    return weight if order is None else weight[:, order.to(weight.device)]


def contradictions(checkpoint: PackedCheckpoint, config: DecoderConfig) -> Iterator[str]:
    """Yields a line for everything in which the files contradict config.json and transformers' reading is followed."""
    silent = [f"{linear.name}.bias" for linear in (*config.spec.linears(), config.spec.head) if not linear.bias]
    if ignored := [name for name in silent if name in checkpoint.files]:
        yield f"ignored: {len(ignored)} biases that config.json does not announce, e.g. {ignored[0]}"
    scales = (name for name in checkpoint.files.names() if name.endswith(UNUSED_SCALES))
    used = {module for module, inputs in checkpoint.inputs.items() if inputs.stored}
    if unused := [name for name in scales if name.rpartition(".")[0] not in used]:
        yield f"ignored: {len(unused)} measured scales of inputs, keys or values, e.g. {unused[0]}"
    if config.spec.tied and not checkpoint.tied:
        yield (
            f"head: {config.spec.names.head}.weight, which differs from the embedding although config.json has "
            "tie_word_embeddings=true"
        )


def packed_matrices(checkpoint: PackedCheckpoint, config: DecoderConfig) -> Iterator[tuple[Scheme, int, int]]:
    """Yields scheme and shape of each packed matrix that activations are multiplied by."""
    looked_up = set(config.spec.embeddings)
    if head_is_embedding(checkpoint, config):
        looked_up.remove(config.spec.names.embedding)
    for module in sorted(set(checkpoint.modules) - looked_up):
        for scheme, rows, columns in checkpoint.schemes[module].matrices(*checkpoint.shape(module)):
            if scheme:
                yield scheme, rows, columns


def exclude_kernels(
    checkpoint: PackedCheckpoint, config: DecoderConfig, target: Target, kernels: str, free: int
) -> dict[str, str]:
    """Returns kernels that may not be chosen for a checkpoint, with the reason.

    Weights are dequantized at load only while their dense form takes at most half of the `free` bytes.
    """
    elements = sum(
        rows * columns
        for scheme, rows, columns in packed_matrices(checkpoint, config)
        if choose_linear(scheme, columns, target, kernels).kernel.is_dense
    )
    needed, limit = elements * target.dtype.itemsize, free // 2
    if needed > limit and kernels in modes():
        reason = f"would need {format_bytes(needed)} of {format_bytes(limit)} allowed"
        return {kernel.name: reason for kernel in linear_kernels() if kernel.is_dense}
    return {}
