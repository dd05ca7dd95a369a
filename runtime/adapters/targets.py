"""Linears of a model that adapters may change, by the names that PEFT gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compress.models.block import Block
from compress.models.mlp import Mixture
from compress.models.spec import ModelSpec
from compress.models.stacks import Slice, Stack

WEIGHT = ".weight"
WRAPPER = "language_model."
"""Part of names that checkpoints of models with other inputs have in other places than transformers."""


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Rows of one expert's factor that belong to one of its linears."""

    expert: int
    module: str
    rows: slice


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter of transformers with the same linears of all experts.

    Attributes:
        name: of the parameter.
        shape: output and input features of one expert.
    """

    name: str
    num_experts: int
    shape: tuple[int, int]
    parts: tuple[StackedPart, ...]


@dataclass(frozen=True, slots=True)
class Targets:
    """Weights that adapters may change.

    Attributes:
        modules: output and input features of linears, by names of the checkpoint.
        stacks: parameters of experts, by the name of their block.
    """

    modules: Mapping[str, tuple[int, int]]
    stacks: Mapping[str, tuple[ExpertStack, ...]]

    @classmethod
    def of(cls, spec: ModelSpec, adapted: Iterable[str]) -> Targets:
        """Describes those linears of a model that are adapted."""
        names = set(adapted)
        shapes = {linear.name: linear.shape for linear in spec.linears() if linear.name in names}
        stacks = {}
        for index, block in enumerate(spec.blocks):
            found = _stacks(spec.block_name(index), block)
            if found and all(part.module in names for stack in found for part in stack.parts):
                stacks[spec.block_name(index)] = found
        return cls(shapes, stacks)

    def module_of(self, name: str) -> str:
        """Returns the module of the checkpoint that PEFT names so; "" for none."""
        if name in self.modules:
            return name
        plain = name.replace(WRAPPER, "")
        return next((each for each in self.modules if each.replace(WRAPPER, "") == plain), "")

    def stacks_of(self, name: str) -> tuple[ExpertStack, ...]:
        """Returns the parameters of the experts that PEFT names so: `BLOCK.mlp.experts`; none for another name."""
        if not name.endswith(".experts"):
            return ()
        plain = name.replace(WRAPPER, "")
        found = (stacks for block, stacks in self.stacks.items() if plain.startswith(block.replace(WRAPPER, "") + "."))
        return next(found, ())


def _stacks(block_name: str, block: Block) -> tuple[ExpertStack, ...]:
    """Describes the parameters in which transformers holds all experts of a block."""
    mixture = block.mixture
    if mixture is None:
        return ()
    whole = [stack for stack in mixture.stacks if stack.parts[0].endswith(WEIGHT)] or _plain_stacks(mixture)
    return tuple(_stack(f"{block_name}.", mixture, stack) for stack in whole)


def _plain_stacks(mixture: Mixture) -> list[Stack]:
    expert = mixture.experts[0]
    both = {"gate_up_proj" if expert.gated else "up_proj": expert.inputs, "down_proj": (expert.down,)}
    return [
        Stack(name, tuple(f"{linear.name.removeprefix(f'{expert.name}.')}{WEIGHT}" for linear in linears))
        for name, linears in both.items()
    ]


def _stack(prefix: str, mixture: Mixture, stack: Stack) -> ExpertStack:
    shapes = {f"{linear.name}{WEIGHT}": linear.shape for linear in mixture.experts[0].linears}
    held = [shapes[f"{mixture.experts[0].name}.{part}"] for part in stack.parts]
    rows = sum(shape[0] for shape in held)
    parts = [
        StackedPart(
            number,
            f"{prefix}{expert.name}.{part.removesuffix(WEIGHT)}",
            Slice(stack, number, place).rows(rows),
        )
        for number, expert in enumerate(mixture.experts)
        for place, part in enumerate(stack.parts)
    ]
    return ExpertStack(stack.name.rpartition(".")[2], len(mixture.experts), (rows, held[0][1]), tuple(parts))
