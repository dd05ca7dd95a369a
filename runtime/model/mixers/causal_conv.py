"""Causal convolutions of channels over few tokens, and layers of nothing else (arXiv:2511.23404), in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby, islice

import torch
from torch import Tensor

from compress.models.families.lfm2 import ShortConv
from runtime.backends.base import Linear, Ops
from runtime.backends.state_memory import StepStates
from runtime.core.state_rows import StateRows
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Sequences that follow each other on the token axis and are cut into segments of the same lengths."""

    num_sequences: int
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.num_sequences * sum(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """Ends of the segments of a sequence."""
        return tuple(accumulate(self.lengths))

    def windows(self, seen: Tensor) -> Tensor:
        """Copies what a convolution still sees after each segment, `[segments, kernel - 1, channels]`.

        Args:
            seen: `[sequences, kernel - 1 + rows, channels]`, with the window before the first row in front.
        """
        size = seen.shape[1] - sum(self.lengths)
        return torch.stack([seen[:, stop : stop + size] for stop in self.stops], 1).flatten(0, 1)


def group_rows(rows: StateRows) -> list[RowGroup]:
    """Groups the sequences of a step, in order."""
    if rows.is_single:
        return [RowGroup(len(rows.counts), (1,))]
    lengths = iter(rows.lengths)
    cuts = (tuple(islice(lengths, count)) for count in rows.counts)
    return [RowGroup(len(list(alike)), cut) for cut, alike in groupby(cuts)]


def convolve(seen: Tensor, weight: Tensor) -> Tensor:
    """Convolves `[B, kernel - 1 + n, channels]` with `weight [kernel, channels]`, in the dtype of the weight.

    The sums are the same wherever a text is cut.
    """
    count = seen.shape[1] - len(weight) + 1
    convolved = seen[:, :count] * weight[0]
    for shift, tap in enumerate(weight[1:], 1):
        convolved.addcmul_(seen[:, shift : shift + count], tap)
    return convolved


@dataclass(frozen=True, slots=True)
class ConvLayer(RecurrentMixer):
    """Weights of one layer of `ShortConv`.

    Attributes:
        inputs: b, c and x side by side.
        conv: `[kernel, channels]` in at least float32.
        bias: `[channels]`.
    """

    inputs: Linear
    output: Linear
    conv: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.output.nbytes + self.conv.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        before, after, inner = self.inputs(x).chunk(3, -1)
        groups = group_rows(states.rows)
        rows = (before * inner).split([group.num_rows for group in groups])
        windows = states.read(layer, "window").split([group.num_sequences for group in groups])
        seen = [
            torch.cat((window, part.unflatten(0, (group.num_sequences, -1))), 1)
            for group, part, window in zip(groups, rows, windows, strict=True)
        ]
        states.write(layer, "window", torch.cat([group.windows(s) for group, s in zip(groups, seen, strict=True)]))
        convolved = torch.cat([convolve(each, self.conv).flatten(0, 1) for each in seen])
        convolved = convolved if self.bias is None else convolved + self.bias
        return self.output(after * convolved.to(x.dtype))


@loads(ShortConv)
def load_short_conv(mixer: ShortConv, block: WeightReader) -> ConvLayer:
    """Loads one layer of `ShortConv`."""
    return ConvLayer(
        block.linear(*mixer.qkv),
        block.linear(mixer.output),
        block.vector(mixer.conv, block.wide).squeeze(1).T.contiguous(),
        block.vector(mixer.bias, block.wide) if mixer.bias else None,
    )
