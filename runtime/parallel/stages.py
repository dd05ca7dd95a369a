"""Stages of a model (pipeline parallelism): the consecutive layers that each holds, chosen by their bytes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from compress.common.errors import ToolkitError
from compress.models.generic import CodeSpec

if TYPE_CHECKING:
    from compress.checkpoint.reader import PackedCheckpoint
    from runtime.core.model_config import DecoderConfig

ITEM_SIZE = 2
"""Bytes of an activation when layers are compared."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a model that some ranks hold: consecutive layers. The first one embeds, the last one has the head.

    Attributes:
        index: its number among `count`.
    """

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def plan_stages(model: DecoderConfig, checkpoint: PackedCheckpoint, count: int, pool_bytes: int) -> tuple[Stage, ...]:
    """Divides a model such that the largest stage is as small as possible, by stored weights, pages and states.

    Args:
        pool_bytes: of pages and states of the whole model.

    Raises:
        ToolkitError: a model that cannot be divided among this many stages.
    """
    if isinstance(model.spec, CodeSpec):
        raise ToolkitError(
            "this model cannot be divided into stages: its own modeling code computes all layers at once",
            "Leave out --pipeline-parallel-size",
        )
    weights, shares = stored_bytes(model, checkpoint), pool_shares(model)
    costs = [stored + pool_bytes * share for stored, share in zip(weights, shares, strict=True)]
    return tuple(Stage(index, count, part) for index, part in enumerate(divide(costs, count, allowed_cuts(model))))


def divide(costs: Sequence[float], count: int, cuts: Iterable[int]) -> list[range]:
    """Divides layers into `count` ranges such that the most expensive one is as cheap as possible.

    Args:
        costs: of each layer.
        cuts: layers that a range may begin with.

    Raises:
        ToolkitError: too few of them.
    """
    before, places = list(accumulate(costs, initial=0.0)), sorted(set(cuts) - {0, len(costs)})
    if len(places) < count - 1:
        raise ToolkitError(
            f"this model can be divided into {len(places) + 1} stages, not {count}",
            f"Use --pipeline-parallel-size {len(places) + 1} or less",
        )
    # By where the last range ends, the cost of the most expensive one so far, and where all begin.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for number in range(1, count + 1):
        ends = [len(costs)] if number == count else places
        best = {
            end: min(
                (max(cost, before[end] - before[start]), (*starts, start))
                for start, (cost, starts) in best.items()
                if start < end
            )
            for end in ends
            if any(start < end for start in best)
        }
    _, starts = best[len(costs)]
    return [range(start, end) for start, end in pairwise((*starts, len(costs)))]


def allowed_cuts(model: DecoderConfig) -> list[int]:
    """Returns the layers that a stage may begin with: no layer reads keys, values or chosen tokens of another stage."""
    sources = zip(model.kv_sources, model.index_sources, strict=True)
    earliest = [min(each for each in (layer, *pair) if each >= 0) for layer, pair in enumerate(sources)]
    return [cut for cut in range(1, len(earliest)) if min(earliest[cut:]) >= cut]


def stored_bytes(model: DecoderConfig, checkpoint: PackedCheckpoint) -> list[int]:
    """Returns the bytes in the files by layer: the embedding counts for the first one, the head for the last one."""
    spec, found = model.spec, [0] * model.num_layers
    for name in checkpoint.files.names():
        nbytes, inner = checkpoint.files.tensor_nbytes(name), name.removeprefix(f"{spec.names.blocks}.")
        if inner != name:
            index = int(inner.partition(".")[0]) - spec.names.first_block
            found[index] += nbytes if index < len(found) else 0
            continue
        module = name.rpartition(".")[0]
        found[0] += nbytes if module in spec.embeddings else 0
        is_head = module == spec.names.head or (checkpoint.tied and module == spec.names.embedding)
        found[-1] += nbytes if is_head else 0
    return found


def pool_shares(model: DecoderConfig) -> list[float]:
    """Returns the share of each layer in the memory of pages and states, which take one half each where both exist."""
    parts = [model.keep_stage(range(layer, layer + 1)) for layer in range(model.num_layers)]
    pages = [part.spec.kv_token_bytes(lambda key, value: key + value) + sum(part.index_dims) for part in parts]
    kinds = [sizes for sizes in (pages, [part.state_bytes(ITEM_SIZE) for part in parts]) if any(sizes)]
    return [sum(sizes[layer] / sum(sizes) for sizes in kinds) / len(kinds) for layer in range(model.num_layers)]
