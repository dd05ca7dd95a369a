"""Experts that a loader leaves in host memory, and those that it copies to the device first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compress.checkpoint.expert_popularity import calibration_tokens, popularity
from compress.common.errors import ToolkitError
from compress.models.generic import CodeSpec
from compress.models.spec import ModelSpec
from runtime.backends.expert_slots import ExpertSlots, HostMemory, form_of, tensors_of, with_tensors
from runtime.backends.mlp import Expert
from runtime.core.expert_cache import ExpertCache

LEAVE_OUT = "Leave out --moe-expert-cache"


def check_expert_cache(num_slots: int, spec: ModelSpec, device: torch.device) -> None:
    """Raises ToolkitError for a device or a model that has no use for a cache of experts."""
    if device.type == "cpu":
        raise ToolkitError(
            f"a cache of {num_slots} experts is for GPUs, and on a CPU all weights are in host memory", LEAVE_OUT
        )
    if isinstance(spec, CodeSpec) or not any(block.mixture for block in spec.blocks):
        raise ToolkitError(f"a cache of {num_slots} experts is of no use here: the model has no mixture", LEAVE_OUT)


@dataclass(eq=False)
class ExpertOffload:
    """Experts of all mixtures of a model in host memory.

    Attributes:
        num_slots: experts of each mixture on the device; None leaves all of them there.
        tokens: of each expert in calibration, by the name of its block.
        memory: for the experts.
    """

    num_slots: int | None
    device: torch.device
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = HostMemory(pinned=self.device.type == "cuda")

    @classmethod
    def of(cls, folder: Path, spec: ModelSpec, num_slots: int | None, device: torch.device) -> ExpertOffload:
        """Reads what calibration counted. Raises ToolkitError for a device or a model without use for it."""
        if num_slots is None:
            return cls(None, device)
        check_expert_cache(num_slots, spec, device)
        return cls(num_slots, device, calibration_tokens(folder))

    def expert(self, expert: Expert, count: int) -> Expert:
        """Moves one of `count` experts to where it stays."""
        if self.num_slots is None or self.num_slots >= count:
            return expert
        return with_tensors(expert, map(self.memory.copy, tensors_of(expert)))

    def slots(self, block: str, experts: Sequence[Expert]) -> ExpertSlots | None:
        """Makes slots on the device for the experts of a block; None where they are on the device themselves.

        Raises:
            ToolkitError: experts that cannot take each other's slots.
        """
        count = len(experts)
        if self.num_slots is None or self.num_slots >= count:
            return None
        first = form_of(experts[0])
        if any(form_of(expert) != first for expert in experts):
            raise ToolkitError(
                f"the {count} experts of {block} cannot take each other's slots: their weights or kernels differ",
                f"{LEAVE_OUT}, or use --linear-backend auto",
            )
        cache = ExpertCache(self.num_slots, popularity(self.tokens.get(block, ()), count))
        return ExpertSlots(experts, cache, self.device)

    def describe(self, block: str, count: int) -> str:
        """Says where the experts of a block are; empty where they are on the device."""
        if self.num_slots is None or self.num_slots >= count:
            return ""
        known = len(self.tokens.get(block, ())) == count
        first = "the most popular of calibration" if known else "without counts of a calibration the first ones"
        return f"; experts in host memory, {self.num_slots} of them on the GPU, {first} at the start"


NO_OFFLOAD = ExpertOffload(None, torch.device("cpu"))
