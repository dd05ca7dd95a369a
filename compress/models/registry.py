"""From a model to its architecture: the table first, else the outermost and longest module list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import CheckpointError
from compress.models.llama import ARCHITECTURES
from compress.models.spec import Architecture

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def known_architecture(model_type: str) -> Architecture | None:
    """The table's entry for a `model_type`, if there is one."""
    return next((entry for entry in ARCHITECTURES if model_type in entry.model_types), None)


def find_architecture(model: PreTrainedModel) -> Architecture:
    """The architecture of a model (which may be on the meta device).

    Families outside the table get no siblings and no smoothing edges: their blocks are found by structure alone.

    Raises:
        CheckpointError: no module list that could be the transformer blocks.
    """
    return known_architecture(model.config.model_type) or _by_structure(model)


def _by_structure(model: PreTrainedModel) -> Architecture:
    lists = _outermost_lists(model)
    if not lists:
        raise CheckpointError(
            f"model type {model.config.model_type!r} has no module list of transformer blocks with linear layers",
            "Only decoder-only models built that way can be compressed",
        )
    return Architecture(
        model_types=(model.config.model_type,),
        blocks=max(lists, key=lambda name: len(lists[name])),
        embedding=_name_of(model, model.get_input_embeddings()),
        final_norm="",
        head=_name_of(model, model.get_output_embeddings()),
    )


def _outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Module lists that hold linears and do not stand inside another list (a list of experts does)."""
    from torch import nn

    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        holds_linear = any(isinstance(child, nn.Linear) for child in module.modules())
        if isinstance(module, nn.ModuleList) and holds_linear and not inside:
            found[name] = module
    return found


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "") if wanted is not None else ""
