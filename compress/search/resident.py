"""The whole dense model in memory, so that the effect of one changed layer on the model's output can be measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.checkpoint.errors import NumericsError
from compress.checkpoint.source import TensorFiles
from compress.pipeline.blocks import fill, read_tensor
from compress.pipeline.capture import BlockInputs, StandIn, run_all, run_block
from compress.pipeline.skeleton import Skeleton
from compress.search.units import EMBEDDING


class _Given(StandIn):
    """Returns what it was given beforehand, and keeps what it was passed: the embedding, where it stands first."""

    output: Tensor | None = None
    passed: Tensor

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        self.passed = args[0] if args else kwargs["hidden_states"]
        return self.passed if self.output is None else self.output


class ResidentModel:
    """A model whose blocks run on from stored hidden states, while its own forward does what comes after the blocks.

    Args:
        skeleton: gets real weights; its blocks are taken out and run here.
        measured: the text that divergence is measured on, as it enters the first block.
        tokens: int64 `[N, T]`, the same text.
        device, dtype: where and in which dtype everything computes.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        files: TensorFiles,
        measured: BlockInputs,
        tokens: Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.blocks = list(skeleton.blocks)
        self._skeleton, self._device, self._dtype = skeleton, device, dtype
        self._inputs, self._tokens = measured, tokens.to(device)
        for index, block in enumerate(self.blocks):
            fill(block, skeleton.block_name(index), files, device, dtype)
        _fill_rest(skeleton, files, device)
        given = _take_blocks_out(skeleton)
        self._first, self._last = given[0], given[-1]
        self._reference = [_Reference.of(logits) for logits in self._logits(0)]

    @torch.no_grad()
    def divergence(self, block: int) -> float:
        """Mean KL(dense || now) over all positions, in nats, as the blocks from `block` on are now.

        Those before it must be as they were when `advance` passed them. `EMBEDDING` stands for what comes before all
        blocks, their number for what comes after.

        Raises:
            NumericsError: the output is not finite.
        """
        batches = zip(self._logits(block), self._reference, strict=True)
        total = sum(reference.divergence(logits) for logits, reference in batches)
        if not math.isfinite(total):
            problem = f"the model's output is not finite with a quantized layer in block {block}"
            raise NumericsError(problem, "Use --dtype float32")
        return max(total / self._tokens.numel(), 0.0)

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Moves the text past `block`: from here on blocks up to it do not run again."""
        name = self._skeleton.block_name(block)
        self._inputs.hidden = run_all(self.blocks[block], name, self._inputs, block, self._device)

    def weight(self, module: str) -> nn.Parameter:
        """The weight of a module outside of the blocks, in float32."""
        return self._skeleton.model.get_submodule(module).get_parameter("weight")

    @torch.no_grad()
    def observe_head(self, hidden: Iterable[Tensor], see: Callable[[Tensor], None]) -> None:
        """Shows what the head multiplies, `[B, T, H]`, for outputs of the last block."""
        head = self._skeleton.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _module, args: see(args[0]))
        try:
            for batch in hidden:
                self._after_blocks(batch.to(self._device), self._tokens[:1].expand(len(batch), -1))
        finally:
            handle.remove()

    @torch.no_grad()
    def _logits(self, first: int) -> Iterator[Tensor]:
        """Logits `[B, T, V]` in float32, micro-batch by micro-batch."""
        states = self._inputs.hidden.split(self._inputs.micro_batch)
        batches = zip(states, self._inputs.calls, self._tokens.split(self._inputs.micro_batch), strict=True)
        begin = max(first, 0)
        for hidden, calls, tokens in batches:
            hidden = self._embedded(tokens) if first == EMBEDDING else hidden.to(self._device)
            for module, call in zip(self.blocks[begin:], calls[begin:], strict=True):
                hidden = run_block(module, hidden, call)
            yield self._after_blocks(hidden, tokens)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """What enters the first block, `[B, T, H]`, as the embedding is now."""
        self._last.output = None
        self._skeleton.model(input_ids=tokens, use_cache=False)
        return self._first.passed.to(self._dtype)

    def _after_blocks(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[B, T, V]` of outputs of the last block."""
        self._last.output = hidden.float()
        return self._skeleton.model(input_ids=tokens, use_cache=False).logits.float()


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the dense model said of some positions: probabilities `[B, T, V]`, and the sum of their logarithms' means.

    Kept as probabilities, a divergence is one product and one logarithm of a sum.
    """

    probabilities: Tensor
    negative_entropy: float

    @classmethod
    def of(cls, logits: Tensor) -> _Reference:
        probabilities = torch.softmax(logits, -1)
        return cls(probabilities, -cls(probabilities, 0.0).divergence(logits))

    def divergence(self, logits: Tensor) -> float:
        """KL to a model with these logits `[B, T, V]`, in nats, summed over positions."""
        cross = logits.logsumexp(-1) - torch.linalg.vecdot(self.probabilities, logits)
        return self.negative_entropy + float(cross.sum(dtype=torch.float64))


def _fill_rest(skeleton: Skeleton, files: TensorFiles, device: torch.device) -> None:
    """Real weights for everything outside of the blocks, in float32: the last layers decide what is measured."""
    model = skeleton.model
    for name, parameter in list(model.named_parameters()):
        if name in files and parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = read_tensor(files, name, tuple(parameter.shape)).to(device, torch.float32)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    for module in model.modules():
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, leaf, buffer.to(device))
    if skeleton.ties_head:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _take_blocks_out(skeleton: Skeleton) -> list[_Given]:
    """Puts stand-ins where the blocks were. The output of the last one goes on to the final norm."""
    given = [_Given(block) for block in skeleton.blocks]
    for index, each in enumerate(given):
        skeleton.blocks[index] = each
    return given
