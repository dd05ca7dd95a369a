"""A checkpoint run and differentiated one block at a time: memory does not grow with depth.

A forward pass keeps the inputs of every block. The backward pass takes the blocks in reverse, reads each again and
computes it again with gradients, so they are exactly those of the whole model (checkpointing, Chen et al. 2016,
https://arxiv.org/abs/1604.06174, with weights read again too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.checkpoint.dequantized import dequantized_files
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import OutlierColumns, Weight
from compress.pipeline.block import LoadedBlock, read_tensor
from compress.pipeline.capture import BlockInputs, Call, StandIn, capture_inputs
from compress.pipeline.distillation.parts import offset_unit, rounded, shifted, trained_parts, with_parts
from compress.pipeline.distillation.passed_on import PassedOn
from compress.pipeline.distillation.targets import top_targets
from compress.pipeline.skeleton import Skeleton
from compress.pipeline.smoothing import activations_quantized

Loss = Callable[[Tensor], Tensor]
"""Takes logits `[B, L, V]`; returns a scalar."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A stored tensor, or a part of a stored weight, that is trained.

    Attributes:
        owner: name of the tensor, `model.norm.weight`.
        path: of the part in the weight; empty for a tensor.
        offsets: float32, what is trained: the offset in units of `offset_unit`, or two factors of it (LoRA, Hu et al.
            2021, https://arxiv.org/abs/2106.09685, section 4.1).
    """

    owner: str
    path: str
    offsets: tuple[Tensor, ...]

    def values(self, start: Tensor) -> Tensor:
        """Returns the trained numbers, float32, as they would be stored. `start`: as stored before training."""
        start = start.to(self.offsets[0].device)
        return shifted(start, offset_unit(self.path, start), reduce(torch.matmul, self.offsets))

    @torch.no_grad()
    def stored(self, start: Tensor) -> Tensor:
        """Returns the trained numbers in the dtype of `start`, on the CPU."""
        return rounded(self.values(start), start.to(self.offsets[0].device)).cpu()


@dataclass
class StreamedModel:
    """A checkpoint of which one block at a time is in memory.

    Attributes:
        trained: what is trained, by the name of its tensor; empty for a model that only predicts.
        num_others: outputs of a block after the hidden states; None for blocks that return a tensor.
    """

    skeleton: Skeleton
    checkpoint: PackedCheckpoint
    device: torch.device
    dtype: torch.dtype
    trained: dict[str, list[Trained]] = field(default_factory=dict)
    num_others: int | None = None

    @property
    def offsets(self) -> dict[str, Tensor]:
        """Tensors that an optimizer changes, by name."""
        return {
            f"{each.owner}/{each.path}/{number}": offset
            for parts in self.trained.values()
            for each in parts
            for number, offset in enumerate(each.offsets)
        }

    def capture(self, tokens: Tensor, micro_batch: int) -> BlockInputs:
        """Returns the inputs of the first block. Raises CheckpointError: the model cannot be run by blocks."""
        files = dequantized_files(self.checkpoint) if self.checkpoint.schemes else self.checkpoint.files
        return capture_inputs(self.skeleton, files, tokens, micro_batch, self.device, self.dtype)

    def train_parts(self, rank: int = 0, seed: int = 0) -> None:
        """Makes scales, norms and biases of blocks, final norm and output head trainable, and matrices that are stored
        in 16 bits by updates of this rank; 0 for none. `seed`: of the first of their factors."""
        architecture, blocks = self.skeleton.architecture, f"{self.skeleton.architecture.blocks}."
        outside = {architecture.final_norm, *(() if self.skeleton.ties_head else [architecture.head])}
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.skeleton.model.named_parameters():
            module, _, leaf = name.rpartition(".")
            if module in self.skeleton.routers or not (name.startswith(blocks) or module in outside):
                continue
            stored = self._stored(name, tuple(parameter.shape))
            if isinstance(stored, Weight):
                parts = [self._whole(name, path, part) for path, part in trained_parts(stored).items()]
            elif stored.dim() == 1:
                parts = [self._whole(name, "", stored)] if leaf in ("weight", "bias") else []
            else:
                parts = [self._factored(name, stored, rank, generator)] if self._has_update(name, stored, rank) else []
            if parts:
                self.trained[name] = parts
            self.checkpoint.files.release()

    def _whole(self, owner: str, path: str, part: Tensor) -> Trained:
        zeros = torch.zeros(part.shape, device=self.device, requires_grad=True)
        return Trained(owner, path, (zeros,))

    def _has_update(self, name: str, stored: Tensor, rank: int) -> bool:
        return 0 < rank < min(stored.shape) and stored.dim() == 2 and name in self.checkpoint.files

    def _factored(self, owner: str, stored: Tensor, rank: int, generator: torch.Generator) -> Trained:
        """Returns an update of zero: one step of its first factor changes a number by about one step of an offset."""
        rows, columns = stored.shape
        left = torch.zeros(rows, rank, device=self.device, requires_grad=True)
        right = (torch.randn(rank, columns, generator=generator) / rank**0.5).to(self.device).requires_grad_()
        return Trained(owner, "", (left, right))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Weight | Tensor:
        owner = name.removesuffix(".weight")
        if owner != name and owner in self.checkpoint.schemes:
            return self.checkpoint.packed_weight(owner)
        return read_tensor(self.checkpoint.files, name, shape)

    def _values(self, name: str, place: Tensor) -> Tensor:
        """Returns the values of a parameter or buffer of the model, differentiable in what is trained."""
        stored, parts = self._stored(name, tuple(place.shape)), self.trained.get(name, ())
        if isinstance(stored, Weight):
            return with_trained(stored.to(self.device), parts).dequantize().to(self.dtype)
        if not isinstance(place, nn.Parameter):
            return stored.to(self.device)
        return (parts[0].values(stored) if parts else stored.to(self.device)).to(self.dtype)

    def _leaves(self, names: Mapping[str, Tensor], with_gradients: bool) -> dict[str, Tensor]:
        """Returns parameters and stored buffers by name; those with trained parts are leaves of a graph that ends
        there."""
        with torch.no_grad():
            values = {name: self._values(name, each) for name, each in names.items()}
        if with_gradients:
            for name in values.keys() & self.trained.keys():
                values[name] = values[name].detach().clone().requires_grad_()
        self.checkpoint.files.release()
        return values

    def _descend(self, leaves: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> None:
        """Passes the gradients of leaves on to the offsets, one weight in memory at a time."""
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                self._values(name, names[name]).backward(leaf.grad)
                leaf.grad = None
        self.checkpoint.files.release()

    def _block_names(self, index: int) -> dict[str, Tensor]:
        """Returns the parameters of a block, and its buffers that the files hold, such as biases of a router."""
        prefix, block = self.skeleton.block_name(index), self.skeleton.blocks[index]
        buffers = {f"{prefix}.{name}": each for name, each in block.named_buffers()}
        stored = {name: each for name, each in buffers.items() if name in self.checkpoint.files}
        return {f"{prefix}.{name}": each for name, each in block.named_parameters()} | stored

    def _outside_names(self) -> dict[str, nn.Parameter]:
        left_out = [f"{self.skeleton.architecture.blocks}."]
        left_out += [f"{self.skeleton.architecture.head}.weight"] if self.skeleton.ties_head else []
        parameters = self.skeleton.model.named_parameters()
        return {name: each for name, each in parameters if not name.startswith(tuple(left_out))}

    def _run_block(self, index: int, leaves: Mapping[str, Tensor], call: Call, hidden: Tensor) -> Tensor:
        """Returns the output of a block. Inputs of linears are rounded as their schemes say in a model that is trained,
        and exact in one that only predicts."""
        prefix, module = f"{self.skeleton.block_name(index)}.", self.skeleton.blocks[index]
        own = {name.removeprefix(prefix): value for name, value in leaves.items()}
        schemes = self.checkpoint.schemes if self.trained else {}
        named = {name.removeprefix(prefix): each for name, each in schemes.items() if name.startswith(prefix)}
        inside = {name: each for name, each in named.items() if not isinstance(each, OutlierColumns)}

        def block(*args: Any, **kwargs: Any) -> Any:
            output = functional_call(module, own, args, kwargs)
            self.num_others = len(output) - 1 if isinstance(output, tuple) else None
            return output

        with activations_quantized(LoadedBlock(prefix, module), inside):
            return call.on(self.device).run(block, hidden)

    @torch.no_grad()
    def hidden_states(self, inputs: BlockInputs, numbers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yields the inputs of each block, and of what follows the last one, for each micro-batch."""
        states = [inputs.hidden[inputs.rows(number)].to(self.device) for number in numbers]
        yield states
        for index in range(self.skeleton.num_blocks):
            states = self.advance(inputs, index, numbers, states)
            yield states

    @torch.no_grad()
    def advance(
        self, inputs: BlockInputs, index: int, numbers: Sequence[int], states: Sequence[Tensor]
    ) -> list[Tensor]:
        """Returns the outputs of a block for hidden states of these micro-batches, which may repeat."""
        leaves = self._leaves(self._block_names(index), with_gradients=False)
        pairs = zip((inputs.calls[number][index] for number in numbers), states, strict=True)
        return [self._run_block(index, leaves, call, hidden) for call, hidden in pairs]

    def outputs(self, inputs: BlockInputs, numbers: Sequence[int]) -> list[Tensor]:
        """Returns the outputs of the last block for each micro-batch."""
        states = list[Tensor]()
        for states in self.hidden_states(inputs, numbers):  # noqa: B007 - those of other blocks are not kept
            pass
        return states

    @torch.no_grad()
    def targets(self, tokens: Tensor, micro_batch: int, count: int) -> Iterator[dict[str, Tensor]]:
        """Yields targets; see `Teacher`."""
        inputs, outside = self.capture(tokens, micro_batch), self.outside()
        for number, states in enumerate(self.outputs(inputs, range(len(inputs.calls)))):
            yield top_targets(self.logits(outside, tokens[inputs.rows(number)], states), count)

    def logits(self, leaves: Mapping[str, Tensor], tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the logits `[B, L, V]` of the outputs of the last block: the model's own forward pass, in which the
        blocks pass on `hidden`. `leaves`: of `outside`."""
        blocks, model = self.skeleton.blocks, self.skeleton.model
        kept, architecture, values = list(blocks), self.skeleton.architecture, dict(leaves)
        if self.skeleton.ties_head:
            values[f"{architecture.head}.weight"] = values[f"{architecture.embedding}.weight"]
        given = hidden if self.num_others is None else (hidden, *[None] * self.num_others)
        try:
            for index, block in enumerate(kept):
                blocks[index] = _Given(block, given)
            arguments = {"input_ids": tokens.to(self.device), "use_cache": False}
            output: Tensor = functional_call(model, values, (), arguments).logits
        finally:
            for index, block in enumerate(kept):
                blocks[index] = block
        return output

    def outside(self, with_gradients: bool = False) -> dict[str, Tensor]:
        """Returns the parameters outside the blocks."""
        return self._leaves(self._outside_names(), with_gradients)

    def gradients(self, inputs: BlockInputs, tokens: Tensor, losses: Mapping[int, Loss]) -> float:
        """Adds the gradients of the sum of losses to the offsets, and returns that sum.

        Args:
            tokens: `[N, L]`, of all sequences.
            losses: by micro-batch.
        """
        order = [*losses]
        passed = [PassedOn.of(inputs.calls[number]) for number in order]
        states = list[list[Tensor]]()
        for each in self.hidden_states(inputs, order):
            states.append(each)
            for one in passed:
                one.before.append(dict(one.store))
        total, gradients, leaves = 0.0, list[Tensor](), self.outside(with_gradients=True)
        for number, hidden in zip(order, states.pop(), strict=True):
            hidden = hidden.detach().requires_grad_()
            loss = losses[number](self.logits(leaves, tokens[inputs.rows(number)], hidden))
            loss.backward()
            total += float(loss.detach())
            gradients.append(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        self._descend(leaves, self._outside_names())
        for index in reversed(range(self.skeleton.num_blocks)):
            names = self._block_names(index)
            leaves = self._leaves(names, with_gradients=True)
            calls = [inputs.calls[number][index] for number in order]
            gradients = [
                one.backward(partial(self._run_block, index, leaves, call), hidden, gradient)
                for one, call, hidden, gradient in zip(passed, calls, states.pop(), gradients, strict=True)
            ]
            self._descend(leaves, names)
        return total


def with_trained(
    weight: Weight, parts: Sequence[Trained], numbers: Callable[[Trained, Tensor], Tensor] = Trained.values
) -> Weight:
    """Returns a stored weight with its parts as they were trained."""
    before = trained_parts(weight) if parts else {}
    return with_parts(weight, {each.path: numbers(each, before[each.path]) for each in parts})


class _Given(StandIn):
    """Block that returns a given output, whatever its input."""

    def __init__(self, block: nn.Module, output: Tensor | tuple[Any, ...]) -> None:
        super().__init__(block)
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        return self.output
