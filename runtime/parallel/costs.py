"""Arithmetic of the messages among ranks: bytes of a step, and the time that they take on a link. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.spec import ModelSpec

START_MICROSECONDS = 3.6
"""Time of a collective operation without any step. This and the steps of links are the latencies by which NCCL chooses
its algorithms (`src/graph/tuning.cc`: ring, protocol LL)."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two GPUs.

    Attributes:
        bandwidth: bytes per second in one direction, half of what data sheets state for both.
        step: microseconds from one rank to the next.
    """

    name: str
    bandwidth: float
    step: float


LINKS = (
    Link("NVLink 4", 450e9, 0.47),
    Link("PCIe 5.0 x16", 64e9, 1.0),
    Link("PCIe 4.0 x16", 32e9, 1.0),
    Link("400 Gbit/s", 50e9, 2.7),
)
"""NVIDIA's data sheets: H100 SXM has 900 GB/s of NVLink and 128 GB/s of PCIe 5.0, A100 PCIe 64 GB/s of PCIe 4.0; a
ConnectX-7 adapter has 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of a step that one sequence of operations waits for.

    Attributes:
        nbytes: that the busiest rank sends.
        operations: collective operations and messages.
        steps: from one rank to the next, in all of them.
    """

    nbytes: float
    operations: int
    steps: int

    def microseconds(self, link: Link) -> float:
        """Returns the time on a link, without any computation."""
        return self.operations * START_MICROSECONDS + self.steps * link.step + self.nbytes / link.bandwidth * 1e6


def sums_traffic(spec: ModelSpec, ranks: int, num_tokens: int, itemsize: int) -> Traffic:
    """Returns the messages by which ranks sum what their parts of matrices give: once for the embedding and after each
    mixer and MLP, each sum in a ring of 2 (N - 1) steps."""
    if ranks == 1:
        return Traffic(0, 0, 0)
    sums, steps = 1 + sum(bool(block.mixers) + bool(block.parts) for block in spec.blocks), 2 * (ranks - 1)
    return Traffic(sums * _hidden(spec, num_tokens, itemsize) * steps / ranks, sums, sums * steps)


def stages_traffic(spec: ModelSpec, stages: int, num_tokens: int, itemsize: int) -> Traffic:
    """Returns the messages by which hidden states go from stage to stage and back to the first one."""
    if stages == 1:
        return Traffic(0, 0, 0)
    return Traffic(stages * _hidden(spec, num_tokens, itemsize), stages, stages)


def logits_traffic(spec: ModelSpec, ranks: int, num_rows: int, itemsize: int) -> Traffic:
    """Returns the messages by which hidden states go to the ranks with the output head, and logits to the first one."""
    if ranks == 1:
        return Traffic(0, 0, 0)
    return Traffic(num_rows * (spec.hidden_size + spec.vocab_size) * itemsize, 2, 2)


def step_traffic(
    spec: ModelSpec, tensor: int, stages: int, num_tokens: int, num_rows: int, itemsize: int
) -> tuple[Traffic, ...]:
    """Returns all messages of a step.

    Args:
        tensor: ranks that share the matrices of a layer.
        num_rows: of logits.
    """
    return (
        sums_traffic(spec, tensor, num_tokens, itemsize),
        stages_traffic(spec, stages, num_tokens, itemsize),
        logits_traffic(spec, tensor * stages, num_rows, itemsize),
    )


def _hidden(spec: ModelSpec, num_tokens: int, itemsize: int) -> int:
    return num_tokens * spec.hidden_size * itemsize
