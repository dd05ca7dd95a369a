"""Attention and MLPs on devices apart (MegaScale-Infer), by arithmetic from the measured costs of one device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.core.step import StepPlan
from runtime.simulate.costs import StepSize, step_size
from runtime.simulate.policy import POLICIES, Policy, Setup
from runtime.simulate.worker import VirtualRunner, Worker

GROUP = 4
"""Most devices of one engine."""


def group_seconds(setup: Setup, size: StepSize, attention: int, mlp: int) -> float:
    """Returns the seconds of a step of a group of devices.

    Sequences are divided among the `attention` devices, every matrix of an MLP among the `mlp` devices. Two halves of
    the batch alternate: while one is at the MLPs, the other is at attention. The hidden state of a token moves there
    and back in every layer. Where the step takes less in one piece, it is not halved.
    """

    def parts(halves: int) -> tuple[float, float, float]:
        costs, tokens = setup.costs, size.tokens / halves
        own = (1 - costs.mlp_share) * costs.of_tokens(tokens / attention) + costs.of_rest(size) / halves / attention
        others = costs.mlp_share * costs.of_tokens(tokens) / mlp
        return own, others, 2 * costs.num_layers * tokens * costs.hidden_bytes / setup.bandwidth / min(attention, mlp)

    return min(sum(parts(1)), 2 * max(parts(2)))


def best_split(setup: Setup, num_devices: int) -> int:
    """Returns the number of attention devices for which a full step of decodes takes the least time per sequence."""

    def seconds_each(attention: int) -> float:
        tokens = setup.config.max_num_seqs * attention
        context = tokens * setup.costs.max_model_len / 4
        return group_seconds(setup, StepSize(tokens, tokens, context), attention, num_devices - attention) / tokens

    return min(range(1, num_devices), key=seconds_each)


@dataclass(kw_only=True)
class GroupRunner(VirtualRunner):
    """A runner on several devices, which hold keys and values or MLPs."""

    setup: Setup
    attention: int
    mlp: int

    def seconds_of(self, plan: StepPlan) -> float:
        return group_seconds(self.setup, step_size(plan), self.attention, self.mlp)


@POLICIES.register(order=6)
class AttentionApart(Policy):
    """Engines on groups of devices, some of which compute attention, and the others MLPs and experts."""

    name = "attention-apart"
    help = "attention and MLPs on devices apart, up to 4 for an engine (MegaScale-Infer); --bandwidth"
    least_devices = 2

    def build(self) -> list[Worker]:
        num_groups = -(-self.setup.num_devices // GROUP)
        sizes = [(self.setup.num_devices + place) // num_groups for place in range(num_groups)]
        return [self._worker(size) for size in sizes]

    def _worker(self, num_devices: int) -> Worker:
        setup, config = self.setup, self.setup.config
        attention = best_split(setup, num_devices)
        runner = GroupRunner(
            setup.costs,
            setup.num_blocks * attention,
            setup.costs.max_model_len,
            setup=setup,
            attention=attention,
            mlp=num_devices - attention,
        )
        config = replace(
            config,
            max_num_seqs=config.max_num_seqs * attention,
            max_num_batched_tokens=config.step_tokens * attention,
        )
        return Worker(self.events, runner, config, self.receive, num_devices=num_devices)
