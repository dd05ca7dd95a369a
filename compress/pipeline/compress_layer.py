"""Compression of one linear: pruned or factorized, then quantized, by the methods of its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.weights import Int, LowRank, Scheme, Weight
from compress.checkpoint.weights.integer import integers
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.rotated_inputs import rotate
from compress.common.workers import Worker, Workers
from compress.methods import base
from compress.methods.base import FactorizationMethod, Layer, Pruned, QuantizationMethod
from compress.methods.low_rank import RankedLinear, largest_rank, rank_step, share_out
from compress.methods.outlier_columns import highest, sensitivity
from compress.methods.shared.decomposition import Decomposition, Whitening, decompose, spectrum
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import BlockJob, BlockOutcome, LinearRecord, LoadedBlock
from compress.pipeline.expert_inputs import ExpertStatistics
from compress.plan import LayerPlan, Pruning

Result = TypeVar("Result")

UNREACHED = "no calibration token reached this layer"
WHOLE = "kept whole: factors of this rank would not have fewer weights"


@dataclass(frozen=True, slots=True)
class Ranked:
    """Decomposition of a linear and its rank; None keeps the linear dense."""

    decomposition: Decomposition
    whitening: Whitening
    rank: int | None

    def to(self, device: torch.device) -> Ranked:
        """Returns the same decomposition on `device`."""
        return replace(self, decomposition=self.decomposition.to(device), whitening=self.whitening.to(device))


Tasks = Sequence[tuple[tuple[str, ...], ...]]
"""Linears that one worker takes together, in groups that share an input."""


def decompose_block(
    weights: Mapping[str, Tensor],
    layer_plans: Mapping[str, LayerPlan],
    tasks: Tasks,
    statistics: Sequence[Mapping[str, InputStatistics]],
    workers: Workers,
) -> dict[str, Ranked]:
    """Returns the linears of a block to factorize, with their ranks. Raises NumericsError: the decomposition fails.

    Args:
        weights: float32 `[O, I]` by name inside the block, after smoothing.
        statistics: input statistics by name, for each worker; linears without calibration tokens have none.
    """
    chosen = {name: each for name, each in layer_plans.items() if each.factoring}

    def work(name: str, weight: Tensor, known: _Whitenings) -> tuple[Decomposition, Whitening, Tensor]:
        whitening = known.of(name, chosen[name])
        found = decompose(weight, whitening, largest_rank(*_shape(weight), 1))
        cost = _comparable(chosen[name], found.energies) * known.activity(name)
        return found.to(workers.device), whitening.to(workers.device), cost.to(workers.device)

    parts = _each_linear(work, weights, chosen, tasks, statistics, workers)
    ranks = _ranks(chosen, weights, {name: cost for name, (_, _, cost) in parts.items()})
    return {name: Ranked(found, whitening, ranks[name]) for name, (found, whitening, _) in parts.items()}


def _each_linear(
    work: Callable[[str, Tensor, _Whitenings], Result],
    weights: Mapping[str, Tensor],
    chosen: Mapping[str, LayerPlan],
    tasks: Tasks,
    statistics: Sequence[Mapping[str, InputStatistics]],
    workers: Workers,
) -> dict[str, Result]:
    """Returns the result for each linear of `chosen`, in that order, with its weight on the device of a worker."""
    named = [[name for group in groups for name in group if name in chosen] for groups in tasks]
    rest = chosen.keys() - {name for names in named for name in names}

    def compute(worker: Worker, names: list[str]) -> dict[str, Result]:
        known = _Whitenings(statistics[worker.number], worker.device)
        return {name: work(name, weights[name].to(worker.device), known) for name in names}

    def size(names: list[str]) -> int:
        return sum(weights[name].numel() * min(weights[name].shape) for name in names)

    together = [names for names in named if names] + [[name] for name in chosen if name in rest]
    found = {name: each for part in workers.map(compute, together, size) for name, each in part.items()}
    return {name: found[name] for name in chosen}


def energies(
    weights: Mapping[str, Tensor],
    layer_plans: Mapping[str, LayerPlan],
    tasks: Tasks,
    statistics: Sequence[Mapping[str, InputStatistics]],
    workers: Workers,
) -> dict[str, Tensor]:
    """Returns the energy of each rank of linears to factorize, float64 `[min(O, I)]`, descending; arguments as in
    `decompose_block`. Raises NumericsError if the decomposition fails."""

    def work(name: str, weight: Tensor, known: _Whitenings) -> Tensor:
        plan = layer_plans[name]
        return (_comparable(plan, spectrum(weight, known.of(name, plan))) * known.activity(name)).cpu()

    return _each_linear(work, weights, layer_plans, tasks, statistics, workers)


@dataclass(frozen=True, slots=True)
class _Whitenings:
    """Cache of the last whitening: linears that share an input are consecutive and share its whitening."""

    statistics: Mapping[str, InputStatistics]
    device: torch.device
    last: dict[FactorizationMethod, tuple[InputStatistics | None, Whitening]] = field(default_factory=dict)

    def of(self, name: str, layer_plan: LayerPlan) -> Whitening:
        if layer_plan.factoring is None:
            raise ValueError(f"{name} is not factorized")
        method, statistics = layer_plan.factoring.method, self.statistics.get(name)
        if method not in self.last or self.last[method][0] is not statistics:
            self.last[method] = statistics, _whitening(method, statistics and statistics.to(self.device))
        return self.last[method][1]

    def activity(self, name: str) -> float:
        """Returns the share of tokens that reach a linear, which weights the loss of experts."""
        return self.statistics.activity(name) if isinstance(self.statistics, ExpertStatistics) else 1.0


def _ranks(
    chosen: Mapping[str, LayerPlan], weights: Mapping[str, Tensor], costs: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Returns planned ranks, or the ranks of least loss for stages that allocate by block; each stage separately."""
    ranks = {name: each.scheme.rank if each.scheme else None for name, each in chosen.items()}
    for factoring in {each.factoring for each in chosen.values() if each.factoring and each.factoring.is_shared}:
        members = {
            name: RankedLinear(*_shape(weights[name]), rank_step(each.scheme.codes), costs[name].tolist())
            for name, each in chosen.items()
            if each.factoring == factoring and each.scheme
        }
        ranks |= share_out(members, factoring.keep_ratio)
    return ranks


def _comparable(plan: LayerPlan, energies: Tensor) -> Tensor:
    """Returns energies that are comparable between linears: output errors, or shares of each layer's total if the
    method's energies have other units."""
    if plan.factoring and plan.factoring.method.energies_are_errors:
        return energies
    return energies / energies.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _whitening(method: FactorizationMethod, statistics: InputStatistics | None) -> Whitening:
    if statistics is not None:
        return method.whitening(statistics)
    return Whitening(recovery=f"{base.fallback('factorize').name}: {UNREACHED}" if method.needs(None).inputs else "")


Stored = Weight | Tensor
"""Stored form of a weight `[O, I]`: packed, or a dense tensor in the model's dtype, including zeros."""


@dataclass(kw_only=True)
class LayerCompressor(Layer):
    """Layer with its plan, in the interface of methods. `outliers`: columns `[k]` that stay in 16 bits, or None."""

    plan: LayerPlan
    ranked: Ranked | None = None
    outliers: Tensor | None = None

    @classmethod
    def of(
        cls,
        name: str,
        weight: Tensor,
        plan: LayerPlan,
        dtype: torch.dtype,
        inputs: HessianCache,
        ranked: Ranked | None = None,
        outliers: Tensor | None = None,
    ) -> LayerCompressor:
        # Methods without codes do not read the scheme.
        scheme = (plan.scheme.codes if plan.scheme else None) or Int()
        data = name, weight, scheme, plan.options, dtype, inputs
        return cls(*data, plan=plan, ranked=ranked, outliers=outliers)

    def apply(self) -> tuple[Stored, LinearRecord]:
        """Prunes or factorizes, quantizes, and records the layer. Raises SchemeError, NumericsError: raised by the
        methods."""
        if self.ranked is not None and self.ranked.rank is not None:
            return self.finish(self._factorize(self.ranked, self.ranked.rank))
        if self.ranked is not None:
            self.details["kept_whole"] = WHOLE
        pruned = self._prune(self.plan.pruning) if self.plan.pruning else self
        values = pruned._quantize() if isinstance(pruned, LayerCompressor) else pruned
        # Rounded or unquantized values in their stored form.
        scheme = self.plan.scheme
        return self.finish(values if scheme is None or scheme is self.scheme else scheme.wrap(values))

    def to(self, device: torch.device) -> LayerCompressor:
        """Returns the same layer on `device`."""
        return replace(self, weight=self.weight.to(device), inputs=self.inputs.to(device))

    def note_recovery(self, text: str) -> None:
        """Adds a fallback to the record."""
        self.details["recovery"] = "; ".join(filter(None, (self.details.get("recovery", ""), text)))

    def finish(self, stored: Stored) -> tuple[Stored, LinearRecord]:
        """Returns the stored form, on the device of computation, and its record."""
        values = values_of(stored)
        record = LinearRecord(
            self.name,
            self.plan.method.name if self.plan.method else "none",
            _relative_error(self.weight, values, self.inputs.mean_square),
            factoring=str(self.plan.factoring or ""),
            pruning=str(self.plan.pruning or ""),
            zeros=float((values == 0).float().mean()) if self.plan.pruning else 0.0,
            input_outlier=_outlier(self.inputs.statistics),
            **self.details,
        )
        return stored, record

    def _quantize(self) -> Stored:
        if self.plan.method is None:
            return self.weight.to(self.dtype)
        method, order = self._known(self.plan.method), self.plan.scheme.hadamard if self.plan.scheme else 0
        if order:
            turned = replace(self, weight=rotate(self.weight, order), inputs=self.inputs.rotated(order))
            return method.compress(turned)
        return method.compress(self) if self.outliers is None else method.compress_beside(self, self.outliers)

    def _known(self, method: QuantizationMethod) -> QuantizationMethod:
        """Returns the method, or its fallback if no calibration token reached the layer."""
        if not method.needs(self.plan.options).inputs or self.inputs.statistics is not None:
            return method
        instead = base.fallback("quantize")
        self.details["recovery"] = f"{instead.name}: {UNREACHED}"
        return base.QUANTIZATION.find(instead.name)

    def _prune(self, pruning: Pruning) -> LayerCompressor | Weight:
        method = pruning.method
        if method.needs(None).inputs and self.inputs.statistics is None:
            method = base.fallback("prune")
            self.details["recovery"] = f"pruned by {method.name}: {UNREACHED}"
        # Quantized in the same loop if both methods support it, which compensates the errors of both.
        joined = self.plan.method is not None and self.plan.method.joins_pruning
        joint = self.scheme if joined and isinstance(self.scheme, Int) else None
        found = method.prune(self, pruning.pattern, pruning.sparsity, joint)
        return replace(self, weight=found.values, kept=found.kept) if isinstance(found, Pruned) else found

    def _factorize(self, ranked: Ranked, rank: int) -> LowRankWeight:
        whitening, method = ranked.whitening, self.plan.method
        self.details |= {"recovery": whitening.recovery, "damping": whitening.damping, "rank": rank}
        left, right = ranked.decomposition.truncated(rank)
        if method is None:
            return LowRankWeight(left.to(self.dtype), right.to(self.dtype), LowRank(None, rank))
        if method.needs(self.plan.options).inputs and self.inputs.statistics is None:
            method = base.fallback("quantize")
        return method.round_factors(left, right, self)


@torch.no_grad()
def compress_layers(block: LoadedBlock, job: BlockJob, workers: Workers) -> BlockOutcome:
    """Compresses a block's layers one by one with methods that need no calibration, without a forward pass. Raises
    SchemeError, NumericsError: raised by the method; names the linear. `block`: block with weights of any dtype; each
    worker has one weight at a time in float32, unless they are factorized."""
    outcome = BlockOutcome(dense={f"{block.name}.{name}": tensor for name, tensor in block.dense.items()})
    factorized = {name: block.weights[name].float() for name, each in job.layer_plans.items() if each.factoring}
    ranked = decompose_block(factorized, job.layer_plans, (), [{}] * len(workers.all), workers)

    def compress(worker: Worker, name: str) -> tuple[Stored, LinearRecord]:
        weight, decomposed = block.weights.pop(name).to(worker.device).float(), ranked.pop(name, None)
        module, plan, inputs = f"{block.name}.{name}", job.layer_plans[name], HessianCache(None)
        there = decomposed and decomposed.to(worker.device)
        stored, record = LayerCompressor.of(module, weight, plan, job.scale_dtype, inputs, there).apply()
        return stored.to("cpu"), record

    for stored, record in workers.map(compress, [*job.layer_plans], lambda name: block.weights[name].numel()):
        outcome.keep(stored, record)
    return outcome


def values_of(stored: Stored) -> Tensor:
    """Returns the weight `[O, I]` as float32."""
    return stored.float() if isinstance(stored, Tensor) else stored.dequantize(torch.float32)


_ERROR_ELEMENTS = 2**20
"""Number of weights whose errors are computed at once."""


def _relative_error(weight: Tensor, values: Tensor, importance: Tensor | None) -> float:
    """Returns the squared error divided by the squared weights, each column weighted by the mean square of its
    input."""
    columns = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance
    rows = max(1, _ERROR_ELEMENTS // weight.shape[1])
    error = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for value, exact in zip(values.split(rows), weight.split(rows), strict=True):
        error = error + ((value - exact).square_() @ columns).sum(dtype=torch.float64)
        total = total + (exact.square() @ columns).sum(dtype=torch.float64)
    return float(error / total) if float(total) else 0.0


def _outlier(statistics: InputStatistics | None) -> float | None:
    """Returns the largest input divided by the median of the channels' maxima; None if that is zero."""
    if statistics is None:
        return None
    typical = float(statistics.abs_max.median())
    return float(statistics.abs_max.max()) / typical if typical else None


def choose_columns(
    weights: Mapping[str, Tensor],
    plans: Mapping[str, LayerPlan],
    statistics: InputStatistics | None,
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """Returns the outlier columns `[k]`, int64, ascending, of every linear whose scheme has outliers.

    For 8-bit inputs these are the columns with the largest inputs, otherwise those with the largest rounding loss.

    Args:
        weights: `[O, I]` of linears that share their input, by name.
        statistics: statistics of that input before smoothing; None if unknown.
        scale: `[I]`, divisor of the input from smoothing.
    """
    members: dict[Scheme, list[str]] = {}
    for name in weights:
        scheme = plans[name].quantized
        if scheme is not None and scheme.num_outliers:
            members.setdefault(scheme, []).append(name)
    chosen: dict[str, Tensor] = {}
    for scheme, names in members.items():
        divided = 1.0 if scale is None else scale
        if scheme.activation_bits and statistics is not None:
            score = statistics.abs_max / divided
        else:
            importance = None if statistics is None else statistics.mean_square / torch.as_tensor(divided) ** 2
            score = sensitivity([weights[name] for name in names], integers(scheme.codes), importance)
        chosen |= dict.fromkeys(names, highest(score, scheme.num_outliers))
    return chosen


def outlier_columns(weights: Mapping[str, Weight], block: str) -> dict[str, Tensor]:
    """Returns the outlier columns `[k]`, int64, of packed weights that have some, by name inside the block."""
    return {
        module.removeprefix(f"{block}."): weight.outlier_columns.long()
        for module, weight in weights.items()
        if weight.outlier_columns is not None
    }
