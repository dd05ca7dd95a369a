"""Experts of a mixture as separate linears, named as in the files.

transformers fuses all experts of a layer into three-dimensional parameters; files, engines, plans and statistics have
one matrix per expert.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.models.mlp import MLP, Mixture
from compress.models.spec import ModelSpec


class Expert(nn.Module):
    """MLP of one expert.

    Args:
        mlp: description, with names relative to the block.
        activation: activation between input and output projections.
        gate: what replaces activation and gating, from the outputs of gate and up; None for that of `mlp`.
    """

    def __init__(
        self,
        mlp: MLP,
        activation: Callable[[Tensor], Tensor],
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        for linear in mlp.linears:
            module = nn.Linear(linear.in_features, linear.out_features, linear.bias, device="meta")
            self.add_module(_leaf(linear.name), module)
        self.activation, self.gate = activation, gate or mlp.clamped
        self.is_gated = mlp.gated
        self.inputs = tuple(_leaf(linear.name) for linear in mlp.inputs)
        self.output = _leaf(mlp.down.name)
        self.in_features = mlp.inputs[0].in_features

    def inner(self, x: Tensor) -> Tensor:
        """Computes the input of the output projection."""
        values = [self.get_submodule(name)(x) for name in self.inputs]
        if self.is_gated and len(values) == 1:
            values = list(values[0].chunk(2, dim=-1))
        if self.gate is not None:
            return self.gate(values[0], values[1])
        activated = self.activation(values[0])
        return activated * values[1] if self.is_gated else activated

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.get_submodule(self.output)(self.inner(x))
        return output


class Experts(nn.ModuleList):
    """All experts of a mixture, with the call signature of transformers' fused experts.

    Attributes:
        num_chosen: number of experts per token.
    """

    def __init__(
        self,
        mixture: Mixture,
        activation: Callable[[Tensor], Tensor],
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(Expert(mlp, activation, gate) for mlp in mixture.experts)
        self.num_chosen = mixture.router.num_chosen

    def expert(self, index: int) -> Expert:
        return cast(Expert, self[index])

    def inputs_of(self, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the linears of an expert, grouped by shared input."""
        expert = self.expert(index)
        return expert.inputs, (expert.output,)

    def groups(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields the index of each expert with its linears, grouped by shared input."""
        for index in range(len(self)):
            yield from ((index, group) for group in self.inputs_of(index))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum `[T, H]` of the chosen experts.

        Args:
            hidden_states: `[T, H]`.
            top_k_index, top_k_weights: `[T, k]`.
        """
        out = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            rows, places = (top_k_index == index).nonzero(as_tuple=True)
            found = self[index](hidden_states[rows]) * top_k_weights[rows, places].unsqueeze(-1)
            out.index_add_(0, rows, found.to(out.dtype))
        return out


class WeighedExperts(Experts):
    """All experts of a mixture whose router weights multiply the experts' inputs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
        """Computes the sum `[T, H]` of the chosen experts.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: `[T, k]`.
            weights: `[T, E]`, router weights of all experts.
        """
        out = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            rows = (top_k_index == index).any(-1).nonzero().flatten()
            out.index_add_(0, rows, self[index](hidden_states[rows] * weights[rows, index, None]))
        return out


class WeighedMixture(nn.Module):
    """Mixture of Llama 4 with transformers' call signature; an expert reads only the tokens routed to it."""

    def __init__(self, own: Any, mixture: Mixture) -> None:
        super().__init__()
        self.router, self.shared_expert = own.router, own.shared_expert
        self.experts = WeighedExperts(mixture, own.experts.act_fn)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes `[T, H]` and the scores `[T, E]` of the router."""
        rows = hidden_states.flatten(0, -2)
        scores = self.router(rows)[1]
        weights = scores.float().sigmoid().to(scores.dtype)
        chosen = scores.topk(self.experts.num_chosen).indices
        return self.shared_expert(rows) + self.experts(rows, chosen, weights), scores


def name_experts(model: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    """Replaces fused experts of a model on the meta device by separate ones with the names of the files.

    Returns:
        Former names of routers that are linears.
    """
    before = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for index, block in enumerate(spec.blocks):
        if block.mixture is not None:
            _replace(model.get_submodule(spec.block_name(index)), block.mixture)
    names = {linear.name for linear in spec.routers()}
    routers = {
        name: module for name, module in model.named_modules() if name in names and isinstance(module, nn.Linear)
    }
    return tuple(before[module] for name, module in routers.items() if before[module] != name)


def mixtures(block: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yields the experts of each mixture of a block, with their name."""
    for name, module in block.named_modules():
        if isinstance(module, Experts):
            yield name, module


Names = tuple[str, ...]


def names_of_experts(blocks: Iterable[nn.Module]) -> tuple[tuple[Names, ...], Names, tuple[Names, ...]]:
    """Returns names, relative to a block, of linears of experts that share an input, of routers, and of all linears of
    the experts of a mixture: `siblings`, `routers` and `experts` of an `Architecture`."""
    siblings: dict[tuple[str, ...], None] = {}
    routers: dict[str, None] = {}
    linears: dict[tuple[str, ...], None] = {}
    for block in blocks:
        for name, experts in mixtures(block):
            groups = [[f"{name}.{index}.{leaf}" for leaf in group] for index, group in experts.groups()]
            siblings |= {tuple(group): None for group in groups if len(group) > 1}
            linears[tuple(chain.from_iterable(groups))] = None
            owner = _owner(name)
            routers |= {f"{owner}.{inside}": None for inside in _scorers(block.get_submodule(owner), experts)}
    return tuple(siblings), tuple(routers), tuple(linears)


def _scorers(mixture: nn.Module, experts: Experts) -> Iterator[str]:
    """Yields the linears of a mixture with a score for each expert, or with one that weighs a shared expert."""
    for name, module in mixture.named_modules():
        if isinstance(module, nn.Linear) and module.out_features in (1, len(experts)):
            yield name


def _replace(layer: nn.Module, mixture: Mixture) -> None:
    """Replaces the fused experts of a layer, if it has any."""
    own: Any = getattr(layer, "experts", None)
    if _are_fused(own):
        layer.experts = Experts(mixture, own.act_fn)
        return
    for name, module in list(layer.named_children()):
        experts = getattr(module, "experts", None)
        if _are_fused(experts) and mixture.router.weighs_inputs:
            layer.add_module(name, WeighedMixture(module, mixture))
        elif _are_fused(experts):
            module.experts = Experts(mixture, getattr(experts, "act_fn", nn.Identity()))
            _name_router(module, mixture)
            _rename(layer, name, mixture.name)


def _are_fused(experts: Any) -> bool:
    return isinstance(experts, nn.Module) and any(each.dim() == 3 for each in experts.parameters(recurse=False))


def _name_router(module: nn.Module, mixture: Mixture) -> None:
    """Renames the router, and the module with its bias, to the names of the files."""
    router, inside = mixture.router, len(mixture.name) + 1
    found = (name for name, each in module.named_parameters() if each.shape == router.scores.shape)
    _rename(module, _owner(next(found)), router.scores.name[inside:])
    if router.bias:
        wanted = router.bias[inside:]
        tensors = chain(module.named_parameters(), module.named_buffers())
        _rename(module, _owner(next(name for name, _ in tensors if name.endswith(_leaf(wanted)))), _owner(wanted))


def _rename(root: nn.Module, old: str, new: str) -> None:
    """Renames a module; the old name remains usable as an alias."""
    if old == new:
        return
    child, owner = root.get_submodule(old), root.get_submodule(_owner(old))
    if new.startswith(f"{old}."):
        owner.add_module(_leaf(old), nn.Sequential(OrderedDict({new.removeprefix(f"{old}."): child})))
        return
    delattr(owner, _leaf(old))
    root.get_submodule(_owner(new)).add_module(_leaf(new), child)
    owner.__dict__[_leaf(old)] = child


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
