"""Dense source without some of its blocks, heads, channels or experts, computed tensor by tensor on reading.

The rows and columns of a head or channel are those that its description cuts for a rank (`compress.models.cuts`).
config.json gets smaller numbers, and is accepted only if its description has exactly what stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.config import write_config
from compress.checkpoint.safetensors import LazyTensor, TensorFiles
from compress.common.errors import CheckpointError, RecipeError
from compress.models.block import Block
from compress.models.cuts import Cuts, Rank, size
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mixer import Mixer
from compress.models.mlp import MLP, Mixture
from compress.models.registry import find_family
from compress.models.spec import ModelSpec
from compress.pipeline.skeleton import Skeleton, open_skeleton
from compress.stages.shrink import SAMPLE_TOKENS, ShrinkStage

HEADS, CHANNELS, EXPERTS = KINDS = ("heads", "channels", "experts")
_COPIES = 4
"""Hessian, damped Hessian, its factor and inverse."""
REMEDY = "Remove something else, or prune single weights: compress prune"


@dataclass(frozen=True, slots=True)
class Units:
    """Equal parts of a part of a block, some of which can leave.

    Attributes:
        kind: `HEADS`, `CHANNELS` or `EXPERTS`.
        part: its description.
        count: of heads with all that read them, of channels, or of experts.
        output: linear that reads heads or channels; None for experts.
    """

    kind: str
    part: Mixer | MLP | Mixture
    count: int
    output: Linear | None

    @classmethod
    def of(cls, block: Block, kind: str) -> Units | None:
        """Finds those of a block; None for a block that has none."""
        mixer = block.mixer
        if kind == HEADS and isinstance(mixer, Attention) and not _shares_heads(mixer):
            count = mixer.num_kv_heads if mixer.latent is None else mixer.num_heads
            return cls(kind, mixer, count, mixer.output)
        if kind == CHANNELS and isinstance(block.mlp, MLP):
            return cls(kind, block.mlp, block.mlp.down.in_features, block.mlp.down)
        if kind == EXPERTS and block.mixture is not None:
            return cls(kind, block.mixture, len(block.mixture.experts), None)
        return None

    def indices(self, kept: Tensor) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Returns the rows and columns that stay, None for all, by the name of a matrix or vector."""
        if isinstance(self.part, Mixture):
            router = self.part.router
            names = router.scores.name, f"{router.scores.name}.bias", *router.vectors
            return dict.fromkeys(names, (kept, None))
        cuts = Cuts(Rank(), lambda _module: 1)
        self.part.cut(cuts)

        def chosen(*parts: slice) -> Tensor:
            found = []
            for part in parts:
                width = size(part) // self.count
                found.append((part.start + kept[:, None] * width + torch.arange(width)).flatten())
            return torch.cat(found)

        return {
            name: (chosen(*cut.rows) if cut.rows else None, chosen(cut.columns) if cut.columns else None)
            for name, cut in cuts.found.items()
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """Units of one kind that stay in a block: `units [k]`, int64, ascending. `weight`: reads `[O, k * width]`, what
    replaces the columns of the linear that reads them; None leaves those."""

    units: Tensor
    weight: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SmallerSource:
    """Dense model, or what is left of it. `removed_bytes`: what the parts that left took."""

    files: TensorFiles
    config: dict[str, Any]
    skeleton: Skeleton
    removed_bytes: int = 0

    @property
    def spec(self) -> ModelSpec:
        return _describe(self.config)

    def working_bytes(self, stage: ShrinkStage, itemsize: int) -> int:
        """Returns the memory of the choice: float64 copies of a Hessian, or the hidden states of a sample without each
        of the blocks, whichever is more."""
        outputs = (units.output for block in self.spec.blocks for kind in KINDS if (units := Units.of(block, kind)))
        widest = max((each.in_features for each in outputs if each), default=0)
        hessians = _COPIES * torch.float64.itemsize * widest**2 if stage.heads or stage.channels else 0
        streams = SAMPLE_TOKENS * self.spec.hidden_size * itemsize * (len(self.spec.blocks) + 1) if stage.blocks else 0
        return max(hessians, streams)

    def planned(self, stage: ShrinkStage) -> SmallerSource:
        """Returns the source with as much removed as a stage says, the last blocks and units in place of those that a
        run chooses. Raises RecipeError: it has fewer, or its config.json cannot say what stays."""
        if carried := self.skeleton.carried(self.files.names()):
            problem = f"{carried[0]} belongs to no layer in config.json and may read any of them"
            raise RecipeError(problem, "Leave the shrink stage out")
        if stage.blocks and self.spec.shares_between_blocks:
            raise RecipeError("its blocks read keys, values or choices of earlier ones, so none can leave", REMEDY)
        blocks = [*range(len(self.spec.blocks))]
        for _ in range(stage.blocks):
            blocks.remove(next(self.removable(blocks, blocks[::-1])))
        found = self.with_blocks(blocks)
        numbers = {kind: found.num_kept(stage, kind) for kind in KINDS}
        first = {kind: Kept(torch.arange(number)) for kind, number in numbers.items() if number}
        return found.with_units([first] * len(found.spec.blocks))

    def removable(self, blocks: Sequence[int], order: Sequence[int]) -> Iterator[int]:
        """Yields those of `blocks` that can leave next, in `order`. Raises RecipeError: none can."""
        is_any = False
        for index in order:
            if len(blocks) > 1 and self._shortened([each for each in blocks if each != index]):
                is_any = True
                yield index
        if not is_any:
            raise _unsaid(self.config, f"fewer than {len(blocks)} of {len(self.spec.blocks)} blocks")

    def _shortened(self, kept: Sequence[int]) -> dict[str, Any] | None:
        """Returns config.json with these layers alone; None if it cannot say them."""
        count, full = len(self.spec.blocks), self.skeleton.model.config.to_dict()
        wanted = tuple(self.spec.blocks[index] for index in kept)
        for config in (self.config, full | self.config):
            lists = {key: value for key, value in config.items() if "layer" in key and isinstance(value, list)}
            shorter = {key: [each[index] for index in kept] for key, each in lists.items() if len(each) == count}
            own = {key: shorter[key] for key in shorter if key in self.config or key == "layer_types"}
            changed = self.config | own | {"num_hidden_layers": len(kept)}
            try:
                if _describe(changed).blocks == wanted:
                    return changed
            except CheckpointError:
                continue
        return None

    def num_kept(self, stage: ShrinkStage, kind: str) -> int:
        """Returns how many units stay in each block; 0 for a kind that the stage leaves as it is. Raises RecipeError:
        there are none, they differ between blocks, or none would stay."""
        removed = getattr(stage, kind)
        if not removed:
            return 0
        counts = {units.count for block in self.spec.blocks if (units := Units.of(block, kind))}
        if len(counts) != 1:
            problem = f"the blocks have {' and '.join(map(str, sorted(counts))) or 'no'} {kind}"
            raise RecipeError(f"{problem}, and {kind}={removed} cannot be removed from each", REMEDY)
        count = counts.pop()
        unit = stage.channel_multiple if kind == CHANNELS else 1
        kept = int(count * (1 - removed)) // unit * unit if kind == CHANNELS else count - removed
        least = max((block.mixture.router.num_chosen for block in self.spec.blocks if block.mixture), default=1)
        if not (least if kind == EXPERTS else 1) <= kept < count:
            raise RecipeError(f"{kind}={removed} leaves {max(kept, 0)} of {count}", f"Remove another number of {kind}")
        return kept

    def with_blocks(self, kept: Sequence[int]) -> SmallerSource:
        """Returns the source with these blocks alone, with new numbers. Raises RecipeError."""
        if len(kept) == self.skeleton.num_blocks:
            return self
        names = {
            f"{self.skeleton.block_name(old)}.": f"{self.skeleton.block_name(new)}." for new, old in enumerate(kept)
        }
        blocks = f"{self.skeleton.architecture.blocks}."

        def renamed() -> Iterator[tuple[str, LazyTensor]]:
            for name, tensor in self.files.tensors.items():
                prefix = f"{blocks}{name.removeprefix(blocks).partition('.')[0]}."
                if not name.startswith(blocks):
                    yield name, tensor
                elif prefix in names:
                    yield name.replace(prefix, names[prefix], 1), tensor

        config = self._shortened(kept)
        if config is None:
            raise _unsaid(self.config, f"blocks {', '.join(map(str, kept))} alone")
        return self._with(dict(renamed()), config)

    def with_units(self, kept: Sequence[Mapping[str, Kept]]) -> SmallerSource:
        """Returns the source with these units of each block. Raises RecipeError."""
        kinds = {kind: each for block in kept for kind, each in block.items()}
        if not kinds:
            return self
        tensors = dict(self.files.tensors)
        for index, block in enumerate(self.spec.blocks):
            for kind, each in kept[index].items():
                if units := Units.of(block, kind):
                    _narrow(tensors, f"{self.skeleton.block_name(index)}.", units, each)
        config = self.config
        for kind, each in kinds.items():
            config = self._resized(config, kind, len(each.units))
        known, implied = self.spec.parameters(), _describe(config).parameters()
        if any(each.shape != implied.get(name) for name, each in tensors.items() if name in known):
            raise _unsaid(config, f"fewer {' and '.join(kinds)}")
        return self._with(tensors, config)

    def _resized(self, config: dict[str, Any], kind: str, number: int) -> dict[str, Any]:
        """Returns config.json with another number of units. Raises RecipeError: no key of it says that alone."""
        units = next(units for block in self.spec.blocks if (units := Units.of(block, kind)))
        if isinstance(units.part, Attention):
            heads = units.part.num_heads // units.count * number
            dim = {} if units.part.latent else {"head_dim": units.part.head_dim}
            return config | {"num_attention_heads": heads, "num_key_value_heads": number} | dim
        known, reason = self.skeleton.model.config.to_dict() | config, ""
        keys = [key for key, value in known.items() if type(value) is int and value == units.count]
        same = [key for key in keys if key in config and kind in key]  # such as num_experts and num_local_experts
        for chosen in ([same] if same else []) + [[key] for key in keys]:
            changed = config | dict.fromkeys(chosen, number)
            try:
                blocks = _describe(changed).blocks
            except CheckpointError as error:
                reason = reason or f": {error.problem}"
                continue
            if {found.count for block in blocks if (found := Units.of(block, kind))} == {number}:
                return changed
        raise _unsaid(config, f"{number} {kind}{reason}")

    def _with(self, tensors: Mapping[str, LazyTensor], config: dict[str, Any]) -> SmallerSource:
        """Returns a source of these tensors, whose codes are read as numbers."""
        tensors = {name: replace(tensor, scheme=None) for name, tensor in tensors.items()}
        files = replace(self.files, tensors=tensors)
        with TemporaryDirectory() as folder:  # transformers reads files
            write_config(Path(folder), config)
            try:
                skeleton = open_skeleton(Path(folder), config)
            except CheckpointError as error:
                reason = error.problem.replace(f" of {folder}", "")
                raise RecipeError(f"transformers refuses what would be left: {reason}", REMEDY) from error
        removed = self.files.nbytes - files.nbytes
        return replace(self, files=files, config=config, skeleton=skeleton, removed_bytes=self.removed_bytes + removed)


def _describe(config: Mapping[str, Any]) -> ModelSpec:
    describe = find_family(config.get("model_type"))
    if describe is None:
        problem = f"model type {config.get('model_type')!r} cannot shrink: the parts of its blocks are unknown"
        raise RecipeError(problem, "Leave the shrink stage out")
    return describe(config)


def _unsaid(config: Mapping[str, Any], what: str) -> RecipeError:
    return RecipeError(f"config.json of model type {config.get('model_type')!r} cannot say {what}", REMEDY)


def _shares_heads(mixer: Attention) -> bool:
    """Returns whether other layers read its keys, or a norm is over all heads at once: then none can leave alone."""
    return mixer.kv_layer is not None or any(norm.size != mixer.head_dim for norm in mixer.qk_norm or ())


def _narrow(tensors: dict[str, LazyTensor], prefix: str, units: Units, kept: Kept) -> None:
    """Replaces the tensors of a block by those of some units."""
    for name, (rows, columns) in units.indices(kept.units).items():
        for full in (f"{prefix}{name}.weight", f"{prefix}{name}"):
            if full in tensors:
                tensors[full] = _picked(tensors[full], rows, columns)
    if units.output is not None and kept.weight is not None:
        name = f"{prefix}{units.output.name}.weight"
        tensors[name] = replace(tensors[name], read=kept.weight, place=None)
    if isinstance(units.part, Mixture):
        _renumber(tensors, prefix, units.part.experts, kept.units.tolist())


def _picked(tensor: LazyTensor, rows: Tensor | None, columns: Tensor | None) -> LazyTensor:
    """Returns some rows and columns of a matrix, or some elements of a vector, also of one stored as a row."""
    dims = (0 if tensor.shape[0] > 1 else -1, rows), (1, columns)
    chosen = {dim: index for dim, index in dims if index is not None}
    shape = list(tensor.shape)
    for dim, index in chosen.items():
        shape[dim] = len(index)

    def read() -> Tensor:
        found = tensor.read()
        for dim, index in chosen.items():
            found = found.index_select(dim, index)
        return found

    nbytes = math.prod(shape) * tensor.dtype.itemsize
    return replace(tensor, shape=tuple(shape), nbytes=nbytes, read=read, place=None)


def _renumber(tensors: dict[str, LazyTensor], prefix: str, experts: Sequence[MLP], kept: Sequence[int]) -> None:
    """Removes the tensors of all experts but those kept, which take the first numbers."""
    leaves = ("weight", "bias")
    stored = [
        [(f"{prefix}{linear.name}.{leaf}", tensors.pop(f"{prefix}{linear.name}.{leaf}", None)) for linear, leaf in each]
        for each in ([*product(expert.linears, leaves)] for expert in experts)
    ]
    names = [[name for name, _ in expert] for expert in stored]
    for new, old in enumerate(kept):
        found = zip(names[new], stored[old], strict=True)
        tensors |= {name: tensor for name, (_, tensor) in found if tensor is not None}
