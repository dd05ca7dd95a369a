"""Descriptions of decoder-only models, and what follows from them: names, shapes, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compress.models.block import Block
from compress.models.block_parts import LayerInputs
from compress.models.cuts import Cuts
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mtp import MultiTokenPrediction
from compress.models.norm import Norm
from compress.models.rope import Rope
from compress.models.stacks import Slice


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
        embedding_scale: factor on the rows of the embedding.
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
    def shares_between_blocks(self) -> bool:
        """Whether blocks read keys and values, or a choice of tokens, of earlier ones."""
        return any(
            each.kv_layer is not None or (each.latent is not None and each.latent.index_layer is not None)
            for each in self.attentions
        )

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

    def cut(self, cuts: Cuts) -> ModelSpec:
        """Returns the part of a rank, whose vocabulary stays whole in the description.

        Raises:
            ToolkitError: a model that ranks cannot share, or fewer heads or inner channels than ranks.
        """
        for name, (num_tokens, _) in self.embeddings.items():
            cuts.vector(name, cuts.rank.share(num_tokens))
        cuts.rows(self.head, cuts.rank.share(self.vocab_size))
        blocks = enumerate(self.blocks)
        return replace(self, blocks=tuple(block.cut(cuts.inside(self.block_name(index))) for index, block in blocks))

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters, stored dense with `itemsize` bytes each; a tied head counts once."""
        tied = self.hidden_size * self.vocab_size if self.tied else 0
        return itemsize * (sum(math.prod(shape) for shape in self.parameters().values()) - tied)

    def kv_token_bytes(self, head_bytes: Callable[[int, int], int]) -> int:
        """Bytes that the cache holds per token: keys and values of all layers. `head_bytes`: bytes of one key head and
        one value head, by their dimensions."""
        return sum(mixer.own_kv_heads * head_bytes(*mixer.kv_dims) for mixer in self.attentions)
