"""Measurement of sensitivities: the divergence of the model when one layer group is compressed and all else is dense.

Divergence is nearly quadratic in small changes of the weights, and rounding errors of different layers are nearly
uncorrelated, so the sum of sensitivities is nearly the divergence of the compressed model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from calibration.statistics import InputStatistics, full_float32
from compress.checkpoint.safetensors import TensorFiles
from compress.common.cli import tool_version
from compress.common.errors import NumericsError
from compress.common.workers import Workers
from compress.methods.base import Needs
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import LoadedBlock, fill, read_block, read_tensor
from compress.pipeline.capture import BlockInputs, StandIn, capture_inputs, run_all, store_of
from compress.pipeline.compress_layer import LayerCompressor, Ranked, decompose_block, values_of
from compress.pipeline.observe import observe
from compress.pipeline.prepare import source_identity
from compress.pipeline.resume import RunDisplay
from compress.pipeline.skeleton import Skeleton
from compress.pipeline.smoothing import activations_quantized
from compress.plan import LayerPlan
from compress.search.allocate import Sensitivities
from compress.search.space import EMBEDDING, Candidate, LayerGroup, reads_inputs
from compress.search.survey import Survey


class _Given(StandIn):
    """Replacement of the first block, which returns a given output and keeps its input, the embedding. `others`: other
    elements of the block's output tuple; None if the output is not a tuple."""

    output: Tensor | None = None
    passed: Tensor
    others: tuple[None, ...] | None = None

    def watch(self, _block: nn.Module, _args: Any, output: Any) -> None:
        """Records an output of the block."""
        self.others = None if isinstance(output, Tensor) else (None,) * (len(output) - 1)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        self.passed = args[0] if args else kwargs["hidden_states"]
        given = self.passed if self.output is None else self.output
        return given if self.others is None else (given, *self.others)


class LoadedModel:
    """Dense model whose blocks continue from stored hidden states; its own forward computes final norm and head.

    Args:
        skeleton: skeleton that receives real weights; its blocks are replaced and run here.
        measured: inputs of the first block for the text that divergence is measured on.
        tokens: int64 `[N, T]`, the same text.
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
        self._skeleton, self._workers, self._dtype = skeleton, Workers([device]), dtype
        self._inputs, self._tokens = measured, tokens.to(device)
        for index, block in enumerate(self.blocks):
            fill(block, skeleton.block_name(index), files, device, dtype)
        _fill_rest(skeleton, files, device)
        given = _take_blocks_out(skeleton)
        self._first, self._last = given[0], given[-1]
        self._reference = [_Reference.of(logits) for logits in self._logits(0)]

    @torch.no_grad()
    def divergence(self, block: int) -> float:
        """Returns the mean KL(dense || current) over all positions, in nats, with the current blocks from `block` on.

        Blocks before it must be unchanged since `advance` passed them. `EMBEDDING` is the position before the first
        block, the number of blocks that after the last. Raises NumericsError: the output is not finite.
        """
        batches = zip(self._logits(block), self._reference, strict=True)
        total = sum(reference.divergence(logits) for logits, reference in batches)
        if not math.isfinite(total):
            problem = f"the model's output is not finite with a quantized layer in block {block}"
            raise NumericsError(problem, "Use --dtype float32")
        return max(total / self._tokens.numel(), 0.0)

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Advances the text past `block`, which does not run again."""
        loaded = LoadedBlock(self._skeleton.block_name(block), self.blocks[block])
        self._inputs.hidden = run_all(loaded, self._inputs, block, self._workers)

    def weight(self, module: str) -> nn.Parameter:
        """Returns the weight of a module outside the blocks, in float32."""
        return self._skeleton.model.get_submodule(module).get_parameter("weight")

    @torch.no_grad()
    def observe_head(self, hidden: Iterable[Tensor], see: Callable[[Tensor], None]) -> None:
        """Passes the inputs of the head, `[B, T, H]`, for outputs of the last block."""
        head = self._skeleton.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _module, args: see(args[0]))
        try:
            for batch in hidden:
                self._after_blocks(batch.to(self._workers.device), self._tokens[:1].expand(len(batch), -1))
        finally:
            handle.remove()

    @torch.no_grad()
    def _logits(self, first: int) -> Iterator[Tensor]:
        """Yields logits `[B, T, V]` in float32, one micro-batch at a time."""
        states = self._inputs.hidden.split(self._inputs.micro_batch)
        batches = zip(states, self._inputs.calls, self._tokens.split(self._inputs.micro_batch), strict=True)
        begin = max(first, 0)
        for hidden, calls, tokens in batches:
            hidden = self._embedded(tokens) if first == EMBEDDING else hidden.to(self._workers.device)
            # The next run starts at the same block, which may read outputs passed on by preceding blocks.
            store = store_of(calls)
            passed = {} if store is None else dict(store)
            for module, call in zip(self.blocks[begin:], calls[begin:], strict=True):
                hidden = call.run(module, hidden)
            if store is not None:
                store.update(passed)
            yield self._after_blocks(hidden, tokens)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Returns the input of the first block, `[B, T, H]`, with the current embedding."""
        self._last.output = None
        self._skeleton.model(input_ids=tokens, use_cache=False)
        return self._first.passed.to(self._dtype)

    def _after_blocks(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Returns logits `[B, T, V]` for outputs of the last block."""
        self._last.output = hidden.float()
        logits: Tensor = self._skeleton.model(input_ids=tokens, use_cache=False).logits
        return logits.float()


@dataclass(frozen=True, slots=True)
class _Reference:
    """Probabilities `[B, T, V]` of the dense model, and the sum of their negative entropies.

    With probabilities, a divergence is one product and one log-sum-exp.
    """

    probabilities: Tensor
    negative_entropy: float

    @classmethod
    def of(cls, logits: Tensor) -> _Reference:
        probabilities = torch.softmax(logits, -1)
        return cls(probabilities, -cls(probabilities, 0.0).divergence(logits))

    def divergence(self, logits: Tensor) -> float:
        """Returns the KL to a model with these logits `[B, T, V]`, in nats, summed over positions."""
        cross = logits.logsumexp(-1) - torch.linalg.vecdot(self.probabilities, logits)
        return self.negative_entropy + float(cross.sum(dtype=torch.float64))


def _fill_rest(skeleton: Skeleton, files: TensorFiles, device: torch.device) -> None:
    """Loads weights outside the blocks in float32: final norm and head determine the divergence."""
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
    """Replaces the blocks; the output of the last replacement is passed to the final norm."""
    given = [_Given(block) for block in skeleton.blocks]
    for index, each in enumerate(given):
        each.block.register_forward_hook(each.watch)
        skeleton.blocks[index] = each
    return given


@dataclass
class CandidateLayer:
    """Layer group to compress as several candidates. Computes the decomposition of a method once per group for all
    ranks, and the factorization of a Hessian once for layers that share it.

    Attributes:
        weights: float32 `[O, I]` by full name.
        model_dtype: dtype in which scales and unquantized values are stored.
        observe: function that returns the statistics of a layer's input; None if unknown.
    """

    weights: Mapping[str, Tensor]
    model_dtype: torch.dtype
    observe: Callable[[str], InputStatistics | None]
    _ranked: dict[tuple[str, str], Ranked] = field(default_factory=dict)
    _inputs: HessianCache = field(default_factory=lambda: HessianCache(None))

    def values(self, module: str, layer_plan: LayerPlan) -> Tensor:
        """Returns the weight `[O, I]` with the values of the finished checkpoint, in float32. Raises SchemeError,
        NumericsError: raised by the methods."""
        if (statistics := self.observe(module)) is not self._inputs.statistics:
            self._inputs = HessianCache(statistics)
        weight, ranked = self.weights[module], self._rank(module, layer_plan)
        work = LayerCompressor.of(module, weight, layer_plan, self.model_dtype, self._inputs, ranked)
        return values_of(work.apply()[0])

    def _rank(self, module: str, layer_plan: LayerPlan) -> Ranked | None:
        if layer_plan.factoring is None or layer_plan.scheme is None:
            return None
        key = module, layer_plan.factoring.method.name
        if key not in self._ranked:
            seen = {} if self._inputs.statistics is None else {module: self._inputs.statistics}
            self._ranked[key] = decompose_block(
                self.weights, {module: layer_plan}, (), [seen], Workers([self.weights[module].device])
            )[module]
        return replace(self._ranked[key], rank=layer_plan.scheme.rank)


Wanted = Mapping[LayerGroup, Sequence[Candidate]]
Found = Callable[[LayerGroup, Candidate, float], None]


def identity(survey: Survey) -> dict[str, Any]:
    """Returns everything that sensitivities depend on."""
    context = survey.context
    return {
        **source_identity(context),
        "texts": context.sequences.token_sha256 if context.sequences else None,
        "measured": len(survey.measured),
        "method": survey.request.method,
        "device": context.device.type,
        "dtype": str(context.dtype).removeprefix("torch."),
        "tool": tool_version(),
    }


@torch.no_grad()
def measure(survey: Survey, known: Sensitivities, display: RunDisplay) -> None:
    """Measures missing sensitivities, group by group in the order of the model. Raises CheckpointError: the model does
    not fit in memory, or a tensor is missing or has a wrong shape; NumericsError: weights or activations contain NaN or
    infinity."""
    wanted = {
        group: [each for each in offered if known.get(group, each) is None]
        for group, offered in survey.candidates.items()
    }
    wanted = {group: candidates for group, candidates in wanted.items() if candidates}
    if not wanted:
        return
    survey.require_memory()
    display.step("loading the model")
    meter = _Meter.open(survey)

    def found(group: LayerGroup, candidate: Candidate, divergence: float) -> None:
        known.add(group, candidate, divergence)
        display.finish(f"{group.name} {candidate}: KL {divergence:.6f}")

    for index in range(EMBEDDING, 1 + max(group.block for group in wanted)):
        inside = {group: candidates for group, candidates in wanted.items() if group.block == index}
        if index not in range(len(meter.model.blocks)):
            for group, candidates in inside.items():
                meter.measure_end(group, candidates, found)
            continue
        if inside:
            display.step(f"statistics of block {index}")
            meter.measure(index, inside, found)
        meter.advance(index)


@dataclass
class _Meter:
    """Dense model with the current hidden states of both texts."""

    survey: Survey
    calibration: BlockInputs
    model: LoadedModel

    @classmethod
    def open(cls, survey: Survey) -> _Meter:
        context = survey.context
        place = context.device, context.dtype
        # A single sequence stays in the processor's cache; a GPU runs a micro-batch.
        small = 1 if context.device.type == "cpu" else context.micro_batch
        calibration, measured = (
            capture_inputs(context.skeleton, context.files, tokens, micro_batch, *place)
            for tokens, micro_batch in ((survey.calibration, context.micro_batch), (survey.measured, small))
        )
        model = LoadedModel(context.skeleton, context.files, measured, survey.measured, *place)
        return cls(survey, calibration, model)

    def measure(self, index: int, wanted: Wanted, found: Found) -> None:
        """Measures the missing candidates of one block."""
        context = self.survey.context
        name = context.skeleton.block_name(index)
        inside = {module.removeprefix(f"{name}.") for group in wanted for module in group.modules}
        block = read_block(context.skeleton, context.files, index, inside, context.device)
        block.module = self.model.blocks[index]
        statistics = self._statistics(block, index) if reads_inputs(self.survey.request.method) else {}

        def inputs_of(module: str) -> InputStatistics | None:
            return statistics.get(module.removeprefix(f"{name}."))

        for group, candidates in wanted.items():
            leaves = {module: module.removeprefix(f"{name}.") for module in group.modules}
            weights = {module: block.weights[leaf] for module, leaf in leaves.items()}
            changed = CandidateLayer(weights, context.scale_dtype, inputs_of)
            for candidate in candidates:
                layer_plans = self.survey.layer_plans(group, candidate)
                for module, layer_plan in layer_plans.items():
                    block.set_weight(leaves[module], changed.values(module, layer_plan))
                schemes = {leaves[module]: each.scheme for module, each in layer_plans.items() if each.scheme}
                with activations_quantized(block, schemes):
                    found(group, candidate, 0.0 if candidate.is_dense else self.model.divergence(index))
                # Statistics of experts are computed with the current weights, which must be dense.
                for module, leaf in leaves.items():
                    block.set_weight(leaf, weights[module])

    def measure_end(self, group: LayerGroup, candidates: Sequence[Candidate], found: Found) -> None:
        """Measures the missing candidates of the embedding or the head."""
        context, (module,) = self.survey.context, group.modules
        parameter = self.model.weight(module)
        weight = context.files.tensor(f"{module}.weight").to(parameter.device, torch.float32)
        seen = None
        if reads_inputs(self.survey.request.method_of(group)):
            seen = InputStatistics(weight.shape[1], module, device=context.device)
            self.model.observe_head(self.calibration.hidden.split(context.micro_batch), seen.update)
        changed = CandidateLayer({module: weight}, context.scale_dtype, lambda _: seen)
        for candidate in candidates:
            for layer_plan in self.survey.layer_plans(group, candidate).values():
                parameter.data = changed.values(module, layer_plan)
            found(group, candidate, 0.0 if candidate.is_dense else self.model.divergence(group.block))
        parameter.data = weight

    def _statistics(self, block: LoadedBlock, index: int) -> Mapping[str, InputStatistics]:
        needs = {leaf: Needs(hessian=True) for leaf in block.weights}
        with full_float32():
            return observe(block, self.calibration, index, needs, self.survey.context.workers).statistics

    def advance(self, index: int) -> None:
        """Advances both texts past a block."""
        context = self.survey.context
        block = LoadedBlock(context.skeleton.block_name(index), self.model.blocks[index])
        self.calibration.hidden = run_all(block, self.calibration, index, context.workers)
        self.model.advance(index)
