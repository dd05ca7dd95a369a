"""Loads MLPs and mixtures of them."""

from __future__ import annotations

from dataclasses import replace

from compress.models.block import Block
from compress.models.mlp import CURVE, MLP, Mixture
from runtime.backends.mlp import DenseMLP, Expert, Experts, FeedForward, MLPAndMixture, Xielu
from runtime.backends.registry import choose_mixture
from runtime.model.expert_offload import ExpertOffload
from runtime.model.weight_reader import WeightReader
from runtime.parallel.experts import ExpertExchange
from runtime.parallel.group import Group


def load_mlp(name: str, block: Block, reader: WeightReader, offload: ExpertOffload) -> FeedForward | None:
    """Loads what a block computes after its mixer, if it has more than that.

    Args:
        name: of the block.
        offload: where experts go.
    """
    if block.mlp is None:
        return None
    if isinstance(block.mlp, Mixture):
        return _mixture(name, block.mlp, reader, offload)
    mlp = DenseMLP(block.mlp, _expert(block.mlp, reader), _curve(block.mlp.curve, reader))
    parallel, group = block.parallel_mixture, reader.group
    if parallel is None:
        return mlp
    return MLPAndMixture(
        mlp,
        _mixture(name, parallel.mixture, reader, offload),
        mlp_norm=reader.norm(parallel.mlp_norm),
        input_norm=reader.norm(parallel.input_norm),
        output_norm=reader.norm(parallel.output_norm),
        router_norm=reader.norm(parallel.router_norm),
        sum=None if group is None else group.sum_rows,
        gather=None if group is None else group.gather_rows,
    )


def _mixture(name: str, mixture: Mixture, reader: WeightReader, offload: ExpertOffload) -> Experts:
    router, gate, of_expert = mixture.router, mixture.shared_gate, replace(reader, of_expert=True)
    scores = reader.vector(f"{router.scores.name}.weight", reader.wide if router.in_float32 else None)
    experts = Experts(
        mixture,
        scores,
        tuple(offload.expert(_expert(mlp, of_expert), len(mixture.experts)) for mlp in mixture.experts),
        reader.vector(router.bias, reader.wide).flatten() if router.bias else None,
        None if mixture.shared is None else _expert(mixture.shared, reader),
        None if gate is None else reader.vector(f"{gate.name}.weight"),
        reader.vector(router.expert_scales) if router.expert_scales else None,
        scores_bias=reader.vector(f"{router.scores.name}.bias", scores.dtype) if router.scores.bias else None,
        around=tuple(reader.linear(linear) for linear in mixture.around),
        exchange=_exchange(mixture, reader.group, len(scores)),
    )
    experts = replace(experts, slots=offload.slots(name, experts.experts))
    choice = choose_mixture(experts, reader.target, reader.kernels)
    where = offload.describe(name, len(mixture.experts))
    held = "" if mixture.held is None else f", {len(mixture.experts)} of them here"
    reader.use(f"mixture, {router.num_chosen} of {len(scores)} experts{held}", choice, where)
    return replace(experts, kernel=choice.kernel)


def _exchange(mixture: Mixture, group: Group | None, num_experts: int) -> ExpertExchange | None:
    """Returns what sends tokens to whole experts; None where parts that ranks share read all tokens anyway."""
    if group is None or mixture.held is None or mixture.shared is not None or mixture.around:
        return None
    return ExpertExchange.of(group, num_experts)


def _expert(mlp: MLP, reader: WeightReader) -> Expert:
    return Expert(reader.linear(*mlp.inputs), reader.linear(mlp.down))


def _curve(name: str, reader: WeightReader) -> Xielu | None:
    return Xielu(**{part: reader.vector(f"{name}.{part}") for part in CURVE}) if name else None
