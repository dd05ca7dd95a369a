"""Descriptions of decoder-only models, and what follows from them: names, shapes, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from compress.models.clamped_gate import ClampedGate
from compress.models.stacks import Slice, Stack
from compress.models.state import StateField

if TYPE_CHECKING:
    from compress.models.block_parts import Beside, LayerInput, LayerInputs, PositionScale, Residual, SecondMixer
    from compress.models.latent import Latent
    from compress.models.mixers.recurrent import Recurrent
    from compress.models.mtp import MultiTokenPrediction
    from compress.models.router import Router


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix `[out_features, in_features]` and its bias, if it has one.

    Attributes:
        name: relative to the block; absolute in `ModelSpec.linears`.
        split: dimension that tensor parallelism divides: `columns` are output features (Megatron-LM,
            arXiv:1909.08053, section 3), `rows` input features, whose partial products are summed.
        is_inner: reads what another linear of its mixer gives, not what the mixer reads.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    split: Literal["columns", "rows"] = "columns"
    is_inner: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm (arXiv:1910.07467) over the last `size` channels, multiplied by its weight.

    Attributes:
        offset: added to the stored weight; 1 where checkpoints store the distance to 1.
        centered: the mean is subtracted first (LayerNorm, arXiv:1607.06450).
        bias: a bias is added last.
        in_float32: the weight multiplies before the result is rounded to the activation dtype.
        has_weight: false where nothing is multiplied.
        part: name of the weight inside of the norm.
    """

    name: str
    size: int
    eps: float
    offset: float = 0.0
    centered: bool = False
    bias: bool = False
    in_float32: bool = False
    has_weight: bool = True
    part: str = "weight"

    @property
    def tensor(self) -> str:
        """Name of its weight."""
        return f"{self.name}.{self.part}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the root mean square norm of Llama."""
        return self == Norm(self.name, self.size, self.eps)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864).

    Attributes:
        type: kind of its frequencies, which needs `options`.
        partial: share of the channels of a head that it rotates, the first ones.
        knows_partial: whether the modeling code of the family reads `partial`.
        interleaved: channels 2i and 2i + 1 are a pair, not i and i + D / 2.
        length: longest sequence that is served; above `short_length` all sequences have its long factors.
    """

    type: str
    theta: float
    options: Mapping[str, Any]
    partial: float = 1.0
    knows_partial: bool = False
    interleaved: bool = False
    length: int = 0

    @property
    def short_length(self) -> int | None:
        """Longest sequence for its short factors; None for a type that has no long ones."""
        return self.options["original_max_position_embeddings"] if self.type == "longrope" else None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention.

    Attributes:
        qkv: projections of queries, keys and values in this order; a single linear where they are stored as one.
        rope: None for no positions.
        qk_norm: norms of queries and keys, over each head or over all heads at once, as their size says.
        norms_rotated: `qk_norm` comes after the rotary embedding instead of before it.
        scale: factor on scores; None is `head_dim ** -0.5`.
        softcap: scores s become `softcap * tanh(s / softcap)` before they are masked; None leaves them.
        position_scale: growth of queries with their position, see `PositionScale`.
        window: tokens, itself included, that a token attends to; None is all.
        chunk: a token attends to those of its own chunk of this many tokens only; None is one chunk.
        sink_logits: name of a vector with a score for each head that takes part in the softmax and belongs to no token
            (arXiv:2508.10925); "" for none.
        kv_layer: earlier layer whose keys and values it reads; then `qkv` and `qk_norm` are those of queries alone.
        value_norm: norm over each value head.
        value_is_key: values are keys as projected, before their norm and rotation; `qkv` has no linear for them.
        output_gate: the first of `qkv` gives each query head and then its gate, whose sigmoid multiplies the output.
        latent: what keys and values of all heads are computed from; then `num_kv_heads` is 1, and `qkv` has a linear
            for queries, or for the latents of queries, and one for that of keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: tuple[Linear, ...]
    output: Linear
    rope: Rope | None
    qk_norm: tuple[Norm, ...] | None = None
    norms_rotated: bool = False
    scale: float | None = None
    softcap: float | None = None
    position_scale: PositionScale | None = None
    window: int | None = None
    chunk: int | None = None
    sink_logits: str = ""
    kv_layer: int | None = None
    value_norm: Norm | None = None
    value_is_key: bool = False
    output_gate: bool = False
    latent: Latent | None = None
    name: str = "self_attn"

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """Its rotary embedding and the size of the heads that it rotates."""
        size = self.head_dim if self.latent is None else self.latent.rotated
        return None if self.rope is None else (self.rope, size)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed."""
        return *self.qkv, *(() if self.latent is None else self.latent.linears), self.output

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those inside of it."""
        value = () if self.value_norm is None else (self.value_norm,)
        return *value, *(self.qk_norm or ()), *(() if self.latent is None else self.latent.norms)

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Channels of a key and of a value as they are kept for later tokens."""
        return (self.head_dim, self.head_dim) if self.latent is None else (self.latent.rotated, self.latent.rank)

    @property
    def widest_head(self) -> int:
        """Channels of the widest form of a query: of one that looks at latents, as many as those and a rotated key."""
        return self.head_dim if self.latent is None else max(self.head_dim, self.latent.width)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its sink logits by tensor name."""
        return {self.sink_logits: (self.num_heads,)} if self.sink_logits else {}

    @property
    def state_fields(self) -> dict[str, StateField]:
        """Nothing beside keys and values."""
        return {}

    @property
    def own_kv_heads(self) -> int:
        """Key-value heads that it computes itself."""
        return self.num_kv_heads if self.kv_layer is None else 0

    @property
    def routers(self) -> tuple[Linear, ...]:
        return () if self.latent is None else self.latent.routers


@dataclass(frozen=True, slots=True)
class MLP:
    """`down(activation(gate(x)) * up(x))` (arXiv:2002.05202), or `down(activation(up(x)))`.

    Attributes:
        inputs: gate and up in this order, a single linear where they are stored as one; without a gate, up.
        activation: name as in config.json.
        clamped: replaces activation and gating; None for none.
        curve: module of the learned numbers of activation `xielu`; "" for one without.
        factors: on the gate before its activation, and on the output.
    """

    inputs: tuple[Linear, ...]
    down: Linear
    activation: str = "silu"
    gated: bool = True
    name: str = "mlp"
    clamped: ClampedGate | None = None
    curve: str = ""
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.inputs, self.down

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything but matrices by tensor name."""
        return {f"{self.curve}.{part}": shape for part, shape in CURVE.items()} if self.curve else {}

    @property
    def routers(self) -> tuple[Linear, ...]:
        return ()


CURVE: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Shape of the numbers of xIELU (arXiv:2411.13010) by name."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: the weighted sum of the chosen ones, and of what all tokens share.

    Attributes:
        experts: all with the same sizes.
        shared: MLP for all tokens; None for none.
        shared_gate: one score for each token, whose sigmoid is the weight of `shared`; None is a weight of 1.
        around: linears before and behind `experts`, which read and write fewer channels then; () for none.
        stacks: tensors that may hold the same part of all experts, in place of a tensor for each.
    """

    router: Router
    experts: tuple[MLP, ...]
    shared: MLP | None = None
    shared_gate: Linear | None = None
    name: str = "mlp"
    stacks: tuple[Stack, ...] = ()
    around: tuple[Linear, ...] = ()

    @property
    def mlps(self) -> tuple[MLP, ...]:
        """All experts, and the shared one."""
        return *self.experts, *(() if self.shared is None else (self.shared,))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.around, *(linear for mlp in self.mlps for linear in mlp.linears)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything but matrices by tensor name."""
        found = dict(self.router.vectors)
        for mlp in self.mlps:
            found |= mlp.vectors
        return found

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense: a rounded one sends tokens to other experts."""
        return self.router.scores, *(() if self.shared_gate is None else (self.shared_gate,))


@dataclass(frozen=True, slots=True)
class Block:
    """A transformer block: `x += mixer(input_norm(x))`, then `x += mlp(mlp_norm(x))`.

    Attributes:
        mixer, mlp: None, and so are their norms, in a block of one part.
        input_norm, mlp_norm: None where the residual stream is read as it is. In a parallel block `mlp_norm` is None,
            and `mlp` reads what `mixer` reads.
        output_norm, mlp_output_norm: norms of what mixer and MLP add.
        residual: factors on the residual stream and on what is added to it; None for none.
        second: another mixer, beside attention.
        beside: a mixture that reads the residual stream as the MLP does.
        layer_input: what is added behind the MLP.
        scalar: name of a number that the residual stream is multiplied by last; "" for none.
    """

    input_norm: Norm | None
    mixer: Attention | Recurrent | None
    mlp_norm: Norm | None
    mlp: MLP | Mixture | None
    output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    residual: Residual | None = None
    is_parallel: bool = False
    second: SecondMixer | None = None
    beside: Beside | None = None
    layer_input: LayerInput | None = None
    scalar: str = ""

    @property
    def mixers(self) -> tuple[Attention | Recurrent, ...]:
        both = self.mixer, None if self.second is None else self.second.mixer
        return tuple(mixer for mixer in both if mixer is not None)

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture, in the place of the MLP or beside it."""
        return next((part for part in self.parts if isinstance(part, Mixture)), None)

    @property
    def parts(self) -> tuple[MLP | Mixture, ...]:
        """Its MLP, and the mixture beside it."""
        both = self.mlp, None if self.beside is None else self.beside.mixture
        return tuple(part for part in both if part is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        last = () if self.layer_input is None else (self.layer_input.gate, self.layer_input.output)
        inner = (linear for part in (*self.mixers, *self.parts) for linear in part.linears)
        return *inner, *last

    @property
    def routers(self) -> tuple[Linear, ...]:
        mixers = (linear for mixer in self.mixers for linear in mixer.routers)
        return *mixers, *(() if self.mixture is None else self.mixture.routers)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that belongs to no linear and no norm, by name."""
        found = {name: shape for part in (*self.mixers, *self.parts) for name, shape in part.vectors.items()}
        return found | ({self.scalar: (1,)} if self.scalar else {})

    @property
    def mlps(self) -> tuple[MLP, ...]:
        return tuple(mlp for part in self.parts for mlp in (part.mlps if isinstance(part, Mixture) else (part,)))

    @property
    def norms(self) -> tuple[Norm, ...]:
        last = None if self.layer_input is None else self.layer_input.norm
        around = self.input_norm, self.output_norm, self.mlp_norm, self.mlp_output_norm, last
        beside = () if self.beside is None else self.beside.norms
        inner = (norm for mixer in self.mixers for norm in mixer.norms)
        return *(norm for norm in around if norm is not None), *inner, *beside


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Absolute names of the parts around the blocks, and the number of the first block."""

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model, as its config.json defines it.

    Attributes:
        blocks: one per layer, in order.
        final_norm: norm before the head, with its absolute name.
        tied: whether the head multiplies by the embedding.
        head_bias: whether logits have a bias.
        embedding_scale: factor on the rows of the embedding.
        logit_scale: factor on logits.
        logit_softcap: then logits x become `logit_softcap * tanh(x / logit_softcap)`; None leaves them.
        layer_inputs: what blocks with a `layer_input` read.
        mtp: head of multi-token prediction; None for a family without one.
    """

    hidden_size: int
    vocab_size: int
    blocks: tuple[Block, ...]
    final_norm: Norm
    tied: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: TensorNames = TensorNames()
    layer_inputs: LayerInputs | None = None
    mtp: MultiTokenPrediction | None = None

    @property
    def head(self) -> Linear:
        return Linear(self.names.head, self.vocab_size, self.hidden_size, self.head_bias)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """Linears between the embedding and the first block, with absolute names."""
        return () if self.layer_inputs is None else (self.layer_inputs.projection,)

    @property
    def embeddings(self) -> dict[str, tuple[int, int]]:
        """Shape of every matrix that is looked up, by module name."""
        found = {self.names.embedding: (self.vocab_size, self.hidden_size)}
        return found if self.layer_inputs is None else found | {self.layer_inputs.embedding: self.layer_inputs.shape}

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of the layers that have it, in order."""
        return tuple(block.mixer for block in self.blocks if isinstance(block.mixer, Attention))

    @property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """Rotary embeddings and head dimensions of all layers, each pair once, in order of appearance."""
        found: list[tuple[Rope, int]] = []
        for mixer in self.attentions:
            if mixer.rotation is not None and mixer.rotation not in found:
                found.append(mixer.rotation)
        return tuple(found)

    def block_name(self, index: int) -> str:
        return f"{self.names.blocks}.{self.names.first_block + index}"

    def linears(self) -> Iterator[Linear]:
        """Linears of all blocks with absolute names, in the order in which they are computed."""
        for index, block in enumerate(self.blocks):
            for linear in block.linears:
                yield replace(linear, name=f"{self.block_name(index)}.{linear.name}")

    def routers(self) -> Iterator[Linear]:
        """Linears of all blocks that stay dense, with absolute names."""
        for index, block in enumerate(self.blocks):
            for linear in block.routers:
                yield replace(linear, name=f"{self.block_name(index)}.{linear.name}")

    def expansions(self) -> Iterator[str]:
        """Yields the names of linears that make keys and values of latents, which serving splits by heads."""
        for index, block in enumerate(self.blocks):
            if isinstance(block.mixer, Attention) and block.mixer.latent is not None:
                yield f"{self.block_name(index)}.{block.mixer.latent.expansion.name}"

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that belongs to no linear and no norm, by name."""
        return {
            f"{self.block_name(index)}.{name}": shape
            for index, block in enumerate(self.blocks)
            for name, shape in block.vectors.items()
        }

    def slices(self) -> dict[str, Slice]:
        """Place of every tensor of an expert that may be part of a stack, by absolute names."""
        found: dict[str, Slice] = {}
        for index, block in enumerate(self.blocks):
            if block.mixture is not None:
                name = self.block_name(index)
                for stack in block.mixture.stacks:
                    whole = replace(stack, name=f"{name}.{stack.name}")
                    for number, expert in enumerate(block.mixture.experts):
                        for part, tensor in enumerate(stack.parts):
                            found[f"{name}.{expert.name}.{tensor}"] = Slice(whole, number, part)
        return found

    def norms(self) -> Iterator[Norm]:
        """All norms with weights, with absolute names."""
        for index, block in enumerate(self.blocks):
            for norm in block.norms:
                if norm.has_weight:
                    yield replace(norm, name=f"{self.block_name(index)}.{norm.name}")
        yield self.final_norm
        if self.layer_inputs is not None:
            yield self.layer_inputs.norm

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shape of every matrix by module name: linears, routers, embeddings and head."""
        linears = *self.linears(), *self.routers(), *self.projections, self.head
        return {linear.name: linear.shape for linear in linears} | self.embeddings

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by tensor name; the head is listed even when it is the embedding."""
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in self.matrices().items()}
        linears = (*self.linears(), *self.routers(), *self.projections, self.head)
        shapes |= {f"{linear.name}.bias": (linear.out_features,) for linear in linears if linear.bias}
        shapes |= self.vectors()
        shapes |= {f"{norm.name}.bias": (norm.size,) for norm in self.norms() if norm.bias}
        return shapes | {norm.tensor: (norm.size,) for norm in self.norms()}

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters, stored dense with `itemsize` bytes each; a tied head counts once."""
        tied = self.hidden_size * self.vocab_size if self.tied else 0
        return itemsize * (sum(math.prod(shape) for shape in self.parameters().values()) - tied)

    def kv_token_bytes(self, head_bytes: Callable[[int, int], int]) -> int:
        """Bytes that the cache holds per token: keys and values of all layers.

        Args:
            head_bytes: bytes of one key head and one value head, by their dimensions.
        """
        return sum(mixer.own_kv_heads * head_bytes(*mixer.kv_dims) for mixer in self.attentions)
