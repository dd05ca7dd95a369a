"""Decoder descriptions for the runtime, parsed from config.json. No torch: unsupported models are rejected before
weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.checkpoint.activations import MeasuredActivations, measured_activations
from compress.checkpoint.config import dtype_name
from compress.checkpoint.kv_cache import KVCacheRecord, KVCacheScheme, measured_kv_caches, stored_kv_cache
from compress.checkpoint.state_dtype import STATE_FLOAT32, STATE_ITEMSIZE, MeasuredStates, measured_states
from compress.common.errors import ToolkitError, UnsupportedModelError
from compress.common.files import read_json
from compress.models.block import Block
from compress.models.config import LENGTH, context_length, refusal
from compress.models.generic import CodeSpec
from compress.models.mixers.attention import Attention
from compress.models.mixers.latent import Latent
from compress.models.mixers.mixer import StateField
from compress.models.registry import FAMILIES, find_family
from compress.models.rope import Rope
from compress.models.spec import ModelSpec

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
ROPE_NUMBERS = {
    "dynamic": ("factor",),
    "linear": ("factor",),
    "longrope": ("factor", LENGTH),
    "proportional": ("share",),
    "yarn": ("factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
}
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
GENERATION_FILE = "generation_config.json"
NO_BLOCK = Block(None, None, None, None)
"""Stands in the place of a block that another process computes."""
STREAM_LENGTH = 2**20
"""Default context length of models whose memory does not grow with it."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Decoder-only model: the description of its family, and parameters for serving.

    All blocks have the same norms; heads, windows and rotary embeddings may differ.

    Attributes:
        spec: blocks, names and shapes.
        context_length: maximum sequence length of the model.
        dtype: name of the checkpoint's dtype.
        eos_token_ids: tokens that end a sequence.
        kv_cache: KV cache format recorded in the checkpoint.
        kv_measured: recorded losses of KV cache formats.
        states_measured: recorded losses of recurrent states in fewer bits.
        activations_measured: recorded losses with 16-bit and 8-bit activations.
        whole: the model of which this is a stage; None for a whole model.
    """

    model_type: str
    spec: ModelSpec
    context_length: int
    dtype: str
    eos_token_ids: frozenset[int]
    kv_cache: KVCacheScheme | None = None
    kv_measured: KVCacheRecord | None = None
    states_measured: tuple[MeasuredStates, ...] = ()
    activations_measured: MeasuredActivations | None = None
    whole: DecoderConfig | None = None

    @property
    def mixer(self) -> Attention:
        """Attention of the first layer that has it."""
        return self.spec.attentions[0]

    @property
    def layer_mixers(self) -> tuple[Attention | None, ...]:
        """Attention of every layer; None for recurrent layers."""
        return tuple(each.mixer if isinstance(each.mixer, Attention) else None for each in self.spec.blocks)

    @property
    def default_length(self) -> int:
        """Default maximum length of served sequences. With LongRoPE it is the range of the short factors, as in vLLM,
        because the long factors change the answers to short prompts."""
        short = [rope.short_length for rope, _ in self.spec.rotations if rope.short_length is not None]
        return min([self.context_length, *short])

    @property
    def intermediate_size(self) -> int:
        return max((mlp.down.in_features for block in self.spec.blocks for mlp in block.mlps), default=0)

    @property
    def has_embedding(self) -> bool:
        """Whether tokens are embedded here, and not in another stage."""
        return self.whole is None or self.spec.blocks[0] != NO_BLOCK

    @property
    def has_head(self) -> bool:
        """Whether logits are computed here, and not in another stage."""
        return self.whole is None or self.spec.blocks[-1] != NO_BLOCK

    @property
    def num_layers(self) -> int:
        return len(self.spec.blocks)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Distinct dimensions of rotated heads in ascending order."""
        sizes = {each.head_dim if each.latent is None else each.latent.rotated for each in self.spec.attentions}
        return tuple(sorted(sizes))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Number of KV heads, key dimension and value dimension per layer; zeros for layers without attention."""
        return tuple((0, 0, 0) if each is None else (each.num_kv_heads, *each.kv_dims) for each in self.layer_mixers)

    @property
    def num_kv_layers(self) -> int:
        """Equivalent number of layers of the largest size with the same KV cache memory, rounded down."""
        largest = max(heads * (key + value) for heads, key, value in self.kv_shapes)
        return self.spec.kv_token_bytes(lambda key, value: key + value) // max(largest, 1)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layer whose keys and values each layer reads: its own index, an earlier one, or -1 for none."""
        sources = (-1 if each is None else each.kv_layer for each in self.layer_mixers)
        return tuple(layer if source is None else source for layer, source in enumerate(sources))

    @property
    def index_dims(self) -> tuple[int, ...]:
        """Channels of the index key per token and layer; 0 for layers without an indexer."""
        indexers = (None if each is None else each.indexer for each in self._latents)
        return tuple(0 if indexer is None else indexer.head_dim for indexer in indexers)

    @property
    def index_sources(self) -> tuple[int, ...]:
        """Layer whose indexer selects the tokens of each layer: its own index, an earlier one, or -1 for none."""
        earlier = (None if each is None else each.index_layer for each in self._latents)
        own = (layer if dim else -1 for layer, dim in enumerate(self.index_dims))
        return tuple(mine if other is None else other for mine, other in zip(own, earlier, strict=True))

    @property
    def _latents(self) -> tuple[Latent | None, ...]:
        return tuple(None if mixer is None else mixer.latent for mixer in self.layer_mixers)

    @property
    def state_fields(self) -> dict[int, dict[str, StateField]]:
        """Recurrent state of a sequence by layer and name; empty without recurrent layers."""
        mixers = ((layer, mixer) for layer, block in enumerate(self.spec.blocks) for mixer in block.mixers)
        return {layer: mixer.state_fields for layer, mixer in mixers if mixer.state_fields}

    def state_bytes(self, itemsize: int, dtype: str = STATE_FLOAT32) -> int:
        """Returns the bytes of one sequence's state in all recurrent layers, with activations of `itemsize` bytes.

        Args:
            dtype: name of the storage dtype of states that are computed in float32.
        """
        fields = (field for parts in self.state_fields.values() for field in parts.values())
        return sum(field.nbytes(itemsize, STATE_ITEMSIZE[dtype]) for field in fields)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window per layer, including the token itself; None is full attention."""
        return tuple(None if mixer is None else mixer.window for mixer in self.layer_mixers)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """Attention chunk size per layer, for layers that attend within a chunk; None is one chunk."""
        return tuple(None if mixer is None else mixer.chunk for mixer in self.layer_mixers)

    @property
    def sinks_unsupported_reason(self) -> str:
        """Reason why attention sinks are not supported; empty if they are."""
        mixers = self.spec.attentions
        if not mixers:
            return "none of its layers has attention"
        first = mixers[0]
        if first.latent is not None:
            return "its keys are made of latents"
        heads = {(each.num_heads, each.num_kv_heads, each.head_dim, each.kv_layer) for each in mixers}
        if self.state_fields or len(heads) > 1:
            return "its layers do not all have the same heads and keys of their own"
        if first.rope is None or any(mixer.rope != first.rope for mixer in mixers):
            return "its layers do not all have one rotary embedding"
        if first.softcap is not None or any(mixer.sink_logits for mixer in mixers):
            return "its scores are capped, or its softmax has sink logits"
        if any(mixer.chunk is not None for mixer in mixers):
            return "its tokens attend to their own chunk only"
        return "its queries change after their rotation" if first.norms_rotated or first.position_scale else ""

    def for_length(self, length: int) -> DecoderConfig:
        """Returns the model configured for sequences of up to `length` tokens."""
        return replace(
            self, spec=replace(self.spec, blocks=tuple(_for_length(each, length) for each in self.spec.blocks))
        )

    def keep_stage(self, layers: range) -> DecoderConfig:
        """Returns the part of the model that computes some consecutive layers; empty blocks replace all others."""
        blocks = tuple(block if index in layers else NO_BLOCK for index, block in enumerate(self.spec.blocks))
        scale = self.spec.embedding_scale if 0 in layers else 1.0
        return replace(self, spec=replace(self.spec, blocks=blocks, embedding_scale=scale), whole=self)

    def keep_layers(self, kept: Iterable[int]) -> DecoderConfig:
        """Returns the model with a subset of its layers. Raises ToolkitError if layers depend on their index."""
        if self.spec.layer_inputs is not None or self.spec.shares_between_blocks:
            raise ToolkitError(
                "layers of a model that refers to them by index cannot be skipped",
                "Use --speculative-model ngram",
            )
        return replace(self, spec=replace(self.spec, blocks=tuple(self.spec.blocks[index] for index in kept)))


def _for_length(block: Block, length: int) -> Block:
    mixer = block.mixer
    if not isinstance(mixer, Attention) or mixer.rope is None:
        return block
    return replace(block, mixer=replace(mixer, rope=replace(mixer.rope, length=length)))


def parse_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, code: CodeSpec | None = None
) -> DecoderConfig:
    """Parses config.json (of transformers 4 or 5) and generation_config.json.

    Args:
        code: description of a model that its own modeling code computes; None for a registered family.

    Raises:
        UnsupportedModelError: the model family, rotary embedding, activation or attention is not supported.
        CheckpointError: the config lacks values that define shapes, or has impossible ones.
        SchemeError: the recorded KV cache format is unknown.
    """
    if code is None and config.get("is_causal") is False:
        _refuse("attention that is not causal (is_causal) is not supported")
    spec = _describe(config) if code is None else code
    return DecoderConfig(
        model_type=str(config.get("model_type")),
        spec=spec,
        context_length=(context_length(config) if code is None else code.context_length) or _unnamed_length(spec),
        dtype=dtype_name(config),
        eos_token_ids=_eos_token_ids(config, generation or {}),
        kv_cache=stored_kv_cache(config),
        kv_measured=measured_kv_caches(config),
        states_measured=measured_states(config),
        activations_measured=measured_activations(config),
    )


def _unnamed_length(spec: ModelSpec) -> int:
    """Returns the context length of a model whose config.json has none; without attention the length is unlimited."""
    return 2048 if spec.attentions else STREAM_LENGTH


def _describe(config: Mapping[str, Any]) -> ModelSpec:
    model_type = config.get("model_type")
    describe = find_family(model_type)
    if describe is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; supported families are {', '.join(FAMILIES)}",
            "Serve it with transformers or vLLM: compressed-tensors checkpoints load there unchanged",
        )
    spec = describe(config)
    _refuse(unsupported_reason(spec))
    return spec


def _refuse(reason: str) -> None:
    if reason:
        raise UnsupportedModelError(reason, "Serve it with transformers")


def unsupported_reason(spec: ModelSpec) -> str:
    """Returns the reason why the decoder does not support a model; empty if it does."""
    mixers = spec.attentions
    whole = [block for block in spec.blocks if block.mixer is not None and block.mlp is not None]
    alike = [replace(each, mixer=whole[0].mixer, mlp=whole[0].mlp, residual=whole[0].residual) for each in whole]
    if any(each != whole[0] for each in alike):
        return "layers that differ in more than their attention and MLP are not supported"
    if len({(mixer.softcap, mixer.norms_rotated) for mixer in mixers}) > 1:
        return "scores with different caps are not supported"
    if any(mixer.softcap is not None for mixer in mixers) and any(mixer.sink_logits for mixer in mixers):
        return "sink logits with capped scores are not supported"
    latents = {_without_indexer(mixer.latent) for mixer in mixers}
    if len(latents) > 1:
        return "latent attention that differs from layer to layer is not supported"
    inner = {norm for mixer in mixers if mixer.latent is not None for norm in mixer.latent.norms}
    others = (mixer for block in spec.blocks for mixer in block.mixers if not isinstance(mixer, Attention))
    inner |= {norm for mixer in others for norm in mixer.norms}
    norms = (norm for block in spec.blocks for norm in block.norms)
    if any(norm.eps != spec.final_norm.eps for norm in norms if norm not in inner):
        return "norms with different eps are not supported"
    activations = {mlp.activation for block in spec.blocks for mlp in block.mlps if not mlp.curve}
    activations |= {mixer.activation for block in spec.blocks for mixer in block.mixers if mixer.activation}
    if unknown := sorted(activations - set(ACTIVATIONS)):
        return f"activation {unknown[0]!r} is not supported, only {', '.join(ACTIVATIONS)}"
    return next(filter(None, (_unsupported_rope(*rotation) for rotation in spec.rotations)), "")


def _without_indexer(latent: Latent | None) -> Latent | None:
    return None if latent is None else replace(latent, indexer=None, index_layer=None)


def _unsupported_rope(rope: Rope, head_dim: int) -> str:
    if any(isinstance(value, Mapping) for value in rope.options.values()):
        return "a rotary embedding per layer type is not supported"
    if rope.partial != 1 and not rope.knows_partial:
        return "partial_rotary_factor other than 1 is not supported"
    if rope.type not in ROPE_TYPES:
        return f"rotary embedding {rope.type!r} is not supported, only {', '.join(ROPE_TYPES)}"
    rotated = int(head_dim * rope.partial)
    if head_dim % 2 or rotated % 2:
        return f"heads of {head_dim} channels of which {rotated} rotate in pairs are not supported"
    for key in ("short_factor", "long_factor") if rope.type == "longrope" else ():
        if len(rope.options[key]) != rotated // 2:
            return f"{key} has {len(rope.options[key])} factors, not {rotated // 2}"
    missing = [key for key in ROPE_NUMBERS.get(rope.type, ()) if not isinstance(rope.options.get(key), int | float)]
    return f"rotary embedding {rope.type!r} lacks {', '.join(missing)}" if missing else ""


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads generation_config.json; empty if it is missing. Raises CheckpointError if it is not JSON."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return {}
    content = read_json(path, "Download this file again or remove it")
    return content if isinstance(content, dict) else {}


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """Reads end-of-sequence ids. generation_config.json takes precedence: it also lists the end of a chat turn."""
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in ids):
        raise refusal("eos_token_id", eos, "a token id or a list of them")
    return frozenset(ids)
