"""The dense model beside the quantized one: the same calibration, through blocks that nothing was done to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibration.difference import InputDifference
from compress.pipeline.blocks import LoadedBlock
from compress.pipeline.capture import BlockInputs
from compress.pipeline.observe import linear_inputs


def follow_dense(
    block: LoadedBlock,
    inputs: BlockInputs,
    reference: Tensor,
    index: int,
    linears: Sequence[str],
    device: torch.device,
    tick: Callable[[float], None] = lambda _: None,
) -> tuple[dict[str, InputDifference], Tensor]:
    """Runs the calibration of both models through a block that still has its own weights.

    Args:
        inputs: what enters the block in the quantized model.
        reference: `[N, L, H]`, what enters it in the dense one.
        linears: those whose inputs are compared.
        tick: told the share of the calibration that has passed.

    Returns:
        The differences by linear, without those that other tokens reach in the dense model (experts); and the dense
        model's next hidden states `[N, L, H]`, on the host.
    """
    found = {name: InputDifference(block.linear(name).in_features, device) for name in linears}
    outputs = torch.empty_like(reference)
    begin = 0
    for hidden, call in inputs.batches(index, device):
        tick(begin / len(outputs))
        rows = slice(begin, begin + len(hidden))
        wanted, output = linear_inputs(block, reference[rows].to(device), call, linears)
        outputs[rows] = output
        seen, _ = linear_inputs(block, hidden, call, linears)
        found = {name: each for name, each in found.items() if _add(each, seen.get(name), wanted.get(name))}
        begin = rows.stop
    return found, outputs


def _add(difference: InputDifference, seen: Tensor | None, wanted: Tensor | None) -> bool:
    if seen is None or wanted is None or seen.shape != wanted.shape:
        return False
    difference.update(seen, wanted)
    return True
