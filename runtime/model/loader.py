"""From a checkpoint folder to a decoder: dense or packed, ours or another tool's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from compress.models.block import Block
from compress.models.block_parts import LayerInput
from compress.models.cuts import REMEDY, Cut, Cuts, Rank
from compress.models.generic import CodeSpec
from compress.models.registry import find_family
from runtime.backends.base import Linear, RowSource, Target
from runtime.backends.model import Layer, LayerInputWeights, Model, ResidualRule
from runtime.backends.registry import (
    check_name,
    choose_linear,
    choose_ops,
    is_fast,
    linear_kernels,
    modes,
)
from runtime.core.model_config import DecoderConfig, parse_config, read_generation_config
from runtime.core.progress import Report, Stage, ignore
from runtime.model.decoder import Decoder
from runtime.model.device_files import reader_for
from runtime.model.embedding import Embedding, LayerInputsWeights, SharedEmbedding, make_embedding
from runtime.model.expected_tensors import check_tensors, head_is_embedding
from runtime.model.expert_offload import NO_OFFLOAD, ExpertOffload
from runtime.model.mixers.registry import load_mixer
from runtime.model.mlp import load_mlp
from runtime.model.prepared import NOTHING_PREPARED, NoPrepared, find_prepared
from runtime.model.prepared_key import CPU, CUDA
from runtime.model.rotary import Rotary
from runtime.model.weight_reader import WeightReader
from runtime.parallel.group import Group
from runtime.parallel.passing import NoRows, Passage, PassedInputs
from runtime.parallel.vocabulary import SharedHead, SharedRows

DTYPES = ("bfloat16", "float16", "float32", "float64")


class Unloaded:
    """Stands in the place of an embedding or a linear that is not in memory."""

    nbytes = 0

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise ValueError("this part of the model is not loaded")


UNLOADED = Unloaded()


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Chooses the activation dtype. Raises ToolkitError for an unknown one, or one without a fast path on this CPU."""
    if name != "auto" and name not in DTYPES:
        raise ToolkitError.unknown("dtype", name, ["auto", *DTYPES], "Use --dtype")
    wanted: torch.dtype = getattr(torch, checkpoint_dtype if name == "auto" else name)
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
    group: Group | None = None,
    report: Report = ignore,
) -> Model:
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
        group: of the ranks that share the model; its part of this rank is loaded. None loads the whole model.
        report: is told how many layers are read.

    Raises:
        CheckpointError: a folder that cannot be read, an architecture that is not supported, missing or misshapen
            tensors. All of it is checked before weights are read.
        ToolkitError: a device, dtype or kernel that does not exist, or a cache of experts that is of no use.
    """
    report(Stage.WEIGHTS, 0, 0)
    config, reader = open_weights(path, device, dtype, kernels, as_dense, trust_remote_code)
    checkpoint, target = reader.checkpoint, reader.target
    if prepared is None and target.device.type in (CPU, CUDA) and not as_dense and group is None:
        prepared = find_prepared(checkpoint.path, target.device.type, reader.device_reader)
    reader = replace(reader, prepared=prepared or NOTHING_PREPARED, notes=notes, report=report)
    if group is not None and group.rank.count > 1:
        config, cuts = cut_model(config, checkpoint, group.rank)
        reader = replace(reader, cuts=cuts, group=group)
    if group is not None and group.stage is not None:
        config = config.keep_stage(group.stage.layers)
    offload = ExpertOffload.of(checkpoint.path, config.spec, moe_expert_cache, target.device)
    if not isinstance(config.spec, CodeSpec):
        return DecoderLoader(config, reader, offload, report, group).load()
    from runtime.model.code_decoder import CodeSource

    decoder = CodeSource(checkpoint, config, target, reader.prepare_module, trust_remote_code).load()
    decoder.description, decoder.linears = tuple(reader.description()), reader.linears
    return decoder


def cut_model(
    config: DecoderConfig, checkpoint: PackedCheckpoint, rank: Rank
) -> tuple[DecoderConfig, Mapping[str, Cut]]:
    """Returns the description of the part of a model that a rank holds, and the parts of its weights by name.

    Raises:
        ToolkitError: a model that ranks cannot share.
    """

    def multiple(module: str) -> int:
        scheme = checkpoint.scheme(module)
        if scheme is not None and not scheme.column_multiple:
            raise ToolkitError(f"{module} is stored as {scheme}, which ranks cannot share", REMEDY)
        return 1 if scheme is None else scheme.column_multiple

    cuts = Cuts(rank, multiple)
    return replace(config, spec=config.spec.cut(cuts)), cuts.found


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
    """Builds the decoder of a registered family, whole or in parts."""

    config: DecoderConfig
    reader: WeightReader
    offload: ExpertOffload = NO_OFFLOAD
    report: Report = ignore
    group: Group | None = None

    def load(self) -> Decoder:
        layers = self.layers()
        embedding, head = self._ends()
        frame, layer_inputs = self.frame(), self.layer_inputs()
        checkpoint = self.reader.checkpoint
        notes = (*checkpoint.files.notes, *contradictions(checkpoint, self.config))
        description = (*self.reader.description(), *frame.description, *notes)
        parts: dict[str, Any] = {"embedding": embedding, "layers": layers, "head": head, "layer_inputs": layer_inputs}
        parts |= {"end": self.passage(), "linears": self.reader.linears, "modules": self.reader.modules}
        parts |= {"cuts": self.reader.cuts, "gather": layers[0].gather}
        return replace(frame, **parts, description=description)

    def frame(self) -> Decoder:
        """Returns what is small: norm and rotary embeddings, with empty layers, and `UNLOADED` in the place of
        embedding and head."""
        config, reader, target = self.config, self.reader, self.reader.target
        ops = choose_ops(config, target, reader.kernels)
        return Decoder(
            config=config,
            dtype=target.dtype,
            device=target.device,
            embedding=UNLOADED,
            layers=[Layer()] * len(config.spec.blocks),
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
        reader = replace(self.reader.inside(name), rotations=self.config.spec.rotations)
        sum_rows, gather = (None, None) if reader.group is None else (reader.group.sum_rows, reader.group.gather_rows)
        return Layer(
            norm=reader.optional_norm(block.input_norm),
            mixer=load_mixer(block, reader),
            mlp_norm=reader.optional_norm(block.mlp_norm),
            mlp=load_mlp(name, block, reader, self.offload),
            residual=_residual_rule(block, reader),
            sums=(sum_rows, None if block.parallel_mixture is not None else sum_rows),
            gather=gather,
        )

    def passage(self) -> Passage | None:
        """Returns what passes hidden states between stages; None for a model that is not divided."""
        if self.group is None or self.group.stage is None:
            return None
        return Passage(self.group.stage, self.group, self.config.spec.hidden_size, self.reader.target.dtype)

    def layer_inputs(self) -> LayerInputsWeights | PassedInputs | None:
        """Prepares what layers with an input of their own read; None for a model without such layers."""
        inputs, reader, end = self.config.spec.layer_inputs, self.reader, self.passage()
        if inputs is None:
            return None
        if end is not None and not end.stage.is_first:
            return PassedInputs(end, (inputs.projection.out_features // inputs.size, inputs.size))
        embedding: Embedding = make_embedding(reader.rows(inputs.embedding), reader.target)
        if self.group is not None and self.group.rank.count > 1:
            embedding = SharedRows(embedding, self.group.rank.share(inputs.vocab_size), self.group)
        return LayerInputsWeights(embedding, reader.linear(inputs.projection), reader.norm(inputs.norm))

    def _ends(self) -> tuple[Embedding, Linear]:
        """Prepares embedding and head, with one matrix for both where possible."""
        group, end = self.group, self.passage()
        if group is None:
            return self._own_ends()
        size, count = self.config.spec.vocab_size, group.rank.count
        shares = tuple(Rank(index, count).share(size) for index in range(count))
        own = shares[group.rank.index]
        if end is None:
            embedding, head = self._own_ends()
            return SharedRows(embedding, own, group), SharedHead(head, shares, group)
        first: Embedding = end
        if end.stage.is_first:
            first = self.embedding() if count == 1 else SharedRows(self.embedding(), own, group)
        if not end.stage.is_last and not group.is_first:
            return first, UNLOADED
        return first, SharedHead(self.head() if end.stage.is_last else NoRows(), (slice(0, 0), *shares), group)

    def _own_ends(self) -> tuple[Embedding, Linear]:
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


def _residual_rule(block: Block, reader: WeightReader) -> ResidualRule:
    return ResidualRule(
        norms=(reader.optional_norm(block.output_norm), reader.optional_norm(block.mlp_output_norm)),
        factors=block.residual,
        is_parallel=block.is_parallel,
        input=None if block.layer_input is None else _layer_input(block.layer_input, reader),
        scalar=reader.vector(block.scalar) if block.scalar else None,
    )


def _layer_input(part: LayerInput, reader: WeightReader) -> LayerInputWeights:
    return LayerInputWeights(
        reader.linear(part.gate), reader.linear(part.output), reader.norm(part.norm), part.activation
    )


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
