"""Heads of multi-token prediction: one more block, which predicts the token after the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.models.block import Block
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.norm import Norm

if TYPE_CHECKING:
    from compress.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MultiTokenPrediction:
    """A head of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    At position i it reads the final hidden state of the model and the embedding of token i + 1, and predicts token
    i + 2: `norm(block(projection([embedding_norm(embedding), hidden_norm(hidden)])))`, times the output head of the
    model. All names are absolute but those inside of the block. A checkpoint may lack its tensors.

    Attributes:
        parent, number: the block is `PARENT.NUMBER`.
        projection: `[2 H] -> [H]`.
        feeds_normed: whether the hidden state for the prediction after its own is taken after `norm`, not before it.
    """

    parent: str
    number: int
    block: Block
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear
    norm: Norm
    feeds_normed: bool

    @property
    def block_name(self) -> str:
        return f"{self.parent}.{self.number}"

    def model(self, spec: ModelSpec) -> ModelSpec:
        """Describes the block, its norm and the ends of the model `spec` as a model of one layer."""
        names = replace(spec.names, blocks=self.parent, first_block=self.number)
        return replace(spec, blocks=(self.block,), final_norm=self.norm, names=names, layer_inputs=None, mtp=None)


def with_mtp_layer(spec: ModelSpec, mixer: Attention | None = None) -> ModelSpec:
    """Adds the head that DeepSeek and GLM store as one more layer, of the kind of the last one. `mixer`: of its block,
    where it is another than that of the last layer."""
    number, norm = len(spec.blocks), spec.final_norm
    name = f"{spec.names.blocks}.{number}"
    return replace(
        spec,
        mtp=MultiTokenPrediction(
            spec.names.blocks,
            number,
            spec.blocks[-1] if mixer is None else replace(spec.blocks[-1], mixer=mixer),
            replace(norm, name=f"{name}.enorm"),
            replace(norm, name=f"{name}.hnorm"),
            Linear(f"{name}.eh_proj", spec.hidden_size, 2 * spec.hidden_size),
            replace(norm, name=f"{name}.shared_head.norm"),
            feeds_normed=False,
        ),
    )


def with_mtp_module(spec: ModelSpec, block: Block, name: str = "mtp") -> ModelSpec:
    """Adds the head that Qwen stores as a separate module."""
    norm = spec.final_norm
    return replace(
        spec,
        mtp=MultiTokenPrediction(
            f"{name}.layers",
            0,
            block,
            replace(norm, name=f"{name}.pre_fc_norm_embedding"),
            replace(norm, name=f"{name}.pre_fc_norm_hidden"),
            Linear(f"{name}.fc", spec.hidden_size, 2 * spec.hidden_size),
            replace(norm, name=f"{name}.norm"),
            feeds_normed=True,
        ),
    )
