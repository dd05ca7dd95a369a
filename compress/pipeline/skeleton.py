"""transformers model without weights: blocks are loaded, run and released one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.checkpoint.meta_model import build_on_meta, check_decoder, find_architecture, load_config
from compress.common.errors import CheckpointError
from compress.models.architecture import Architecture
from compress.models.registry import find_family

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Model with parameters on the meta device and real buffers (rotary frequencies). `renamed`: names in transformers
    of dense linears that have other names in the files."""

    model: PreTrainedModel
    architecture: Architecture
    renamed: tuple[str, ...] = ()

    @property
    def blocks(self) -> nn.ModuleList:
        return cast("nn.ModuleList", self.model.get_submodule(self.architecture.blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def ties_head(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return bool(getattr(self.model.config, "tie_word_embeddings", False))

    def head_dim(self, index: int = 0) -> int:
        """Returns the channels per attention head of a block; 1 if neither modules nor config define them."""
        # A recurrent mixer next to attention has other heads.
        for module in sorted(self.blocks[index].modules(), key=lambda each: not hasattr(each, "num_key_value_groups")):
            if isinstance(size := getattr(module, "head_dim", None), int):
                return size
        config = self.model.config
        config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
        heads = getattr(config, "num_attention_heads", 0)
        return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 1)

    def block_name(self, index: int) -> str:
        return f"{self.architecture.blocks}.{index}"

    @property
    def routers(self) -> list[str]:
        """Full names of the routers of all blocks."""
        found = [(index, name) for index in range(self.num_blocks) for name in self.architecture.routers]
        names = {name for name, _ in self.model.named_parameters()}
        full = [f"{self.block_name(index)}.{name}" for index, name in found]
        return [name for name in full if f"{name}.weight" in names]

    def carried(self, names: Iterable[str]) -> list[str]:
        """Returns tensors that belong to no part of this model: layers beyond its last, multi-token prediction
        heads."""
        blocks = tuple(f"{self.block_name(index)}." for index in range(self.num_blocks))
        known = self.model.state_dict().keys()
        return [name for name in names if name not in known and not name.startswith(blocks)]

    def linears(self, block: nn.Module) -> dict[str, nn.Linear]:
        """Returns the linears of a block by relative name, in order of definition, without routers."""
        from torch import nn

        modules = block.named_modules()
        dense = self.architecture.routers
        return {name: module for name, module in modules if isinstance(module, nn.Linear) and name not in dense}

    def all_linears(self) -> dict[str, nn.Linear]:
        """Returns the linears of all blocks by full name, without routers."""
        blocks = enumerate(self.blocks)
        return {
            f"{self.block_name(i)}.{name}": each for i, block in blocks for name, each in self.linears(block).items()
        }


def open_skeleton(path: Path, config: dict[str, Any], trust_remote_code: bool = False) -> Skeleton:
    """Builds the model that `config` describes, without allocating its weights. Raises CheckpointError: not a
    decoder-only text model, or an unknown model type. `config`: parsed config.json, without quantization."""
    from compress.checkpoint.modeling.experts import name_experts
    from compress.checkpoint.modeling.fused import separate_experts
    from compress.checkpoint.modeling.mixer_parts import name_mixer_parts

    check_decoder(path, config, trust_remote_code)
    model = build_on_meta(path, load_config(path, config, trust_remote_code), trust_remote_code)
    renamed: tuple[str, ...] = ()
    if describe := find_family(model.config.model_type):
        spec = describe(model.config.to_dict())
        renamed = name_experts(model, spec) + name_mixer_parts(model, spec)
    else:
        separate_experts(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 3 and "expert" in name:
            raise CheckpointError(
                f"{name} {list(parameter.shape)} holds all experts of a mixture in one tensor",
                "docs/families.md lists the mixtures that can be compressed; serve this one uncompressed",
            )
    return Skeleton(model.eval(), find_architecture(model), renamed)
