"""Kernels as backends offer them, and the registry of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme
from compress.common.registry import Registry
from runtime.backends.adapted_linear import AdaptedLinear, Places, StepAdapters
from runtime.backends.base import Attention, Linear, Ops, Target
from runtime.backends.kv_pages import KVCache, KVPages, make_pages
from runtime.backends.latent import LatentHeadsKernel
from runtime.backends.measured import Verdict
from runtime.backends.mlp import ComputeMixture, Experts
from runtime.backends.model import Model
from runtime.backends.prepared_weight import Layout
from runtime.backends.state_kernels import StateKernel
from runtime.core.batch import Batch, SamplingMetadata, SamplingTensors
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig

Stored = TypeVar("Stored", contravariant=True)
"""Stored forms of weights that a kernel multiplies by."""


@dataclass(frozen=True, slots=True)
class LinearKernel(Generic[Stored]):
    """One way to multiply by a quantized weight.

    Attributes:
        summary: numerics in one line.
        numbers: codes that it multiplies by, as `Scheme.numbers` says; "" for every form that can be dequantized.
        unsupported_reason: why it cannot serve this scheme and number of input features on a target; "" when it can.
        prepare: converts a weight `[O, I]` to the kernel's own layout, once, at load; the bias `[O]` comes in the dtype
            of activations.
        nbytes: of the linear prepared from a weight `[rows, columns]` with 16-bit scales.
        reads_rows: whether a linear with this number of columns is a `RowSource`.
        mode: name that must be asked for; the kernel is then preferred to all others. "" for kernels that need no
            request.
        is_dense: it holds a dense weight, which takes the memory of one.
        saves_memory: a dense product of the weight is faster, or was not measured to be slower, so that it serves where
            that would take too much memory.
        verdict: whether measurements put it before the kernels that are preferred to it, asked where it supports a
            scheme; None for a kernel whose place does not depend on measurements.
        on_request: why it has to be asked for, and how, although measurements put it first; "" where it has not.
        layout: in which files keep its linears from one start to the next; None: they are made again.
        detail: which instructions multiply a scheme on this machine, for people; "" where the summary says all.
        tested_tokens: numbers of tokens, one for each of its ways to multiply, whose products are compared with plain
            torch when the first weight of a form is prepared; none for kernels that are not tested then.
    """

    name: str
    summary: str
    numbers: str
    unsupported_reason: Callable[[Scheme, int, Target], str]
    prepare: Callable[[Stored, Tensor | None, Target], Linear]
    nbytes: Callable[[Scheme, int, int, Target], int]
    reads_rows: Callable[[int, Target], bool] = lambda columns, target: False
    mode: str = ""
    is_dense: bool = False
    saves_memory: bool = False
    verdict: Callable[[Scheme, int, Target], Verdict] | None = None
    on_request: str = ""
    layout: Layout | None = None
    detail: Callable[[Scheme], str] = lambda scheme: ""
    tested_tokens: tuple[int, ...] = ()

    def takes(self, scheme: Scheme) -> bool:
        """Whether it multiplies by such codes at all; kernels that do not are left out of the reasons."""
        return self.numbers in ("", scheme.numbers)


@dataclass(frozen=True, slots=True)
class DenseKernel:
    """One way to multiply by a weight that is not quantized.

    Attributes:
        unsupported_reason: why it cannot serve a weight with these numbers of output and input features; "" when it
            can.
        prepare: takes the weight `[O, I]` on the target's device and in its dtype.
        reads_rows: whether its linear is a `RowSource`.
        nbytes: of its linear, from output features, input features and target.
        mode: as for `LinearKernel`.
        suits: whether it gains from the values of a weight; asked only for kernels with a mode.
        note: shown where the kernel suits a weight and its mode was not asked for.
        layout: as for `LinearKernel`.
    """

    name: str
    summary: str
    unsupported_reason: Callable[[int, int, Target], str]
    prepare: Callable[[Tensor, Tensor | None], Linear]
    nbytes: Callable[[int, int, Target], int]
    reads_rows: bool = False
    mode: str = ""
    suits: Callable[[Tensor], bool] = lambda weight: True
    note: str = ""
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class OpsKernel:
    """One way to compute the operations between linears."""

    summary: str
    unsupported_reason: Callable[[DecoderConfig, Target], str]
    prepare: Callable[[], Ops]


@dataclass(frozen=True, slots=True)
class AdaptedKernel:
    """One way to add the products of adapters to those of a linear.

    Attributes:
        unsupported_reason: why it cannot change a linear with these modules on a target; "" when it can.
    """

    unsupported_reason: Callable[[Linear, Places, Target], str]
    prepare: Callable[[Linear, Places, StepAdapters, Target], AdaptedLinear]


@dataclass(frozen=True, slots=True)
class MixtureKernel:
    """One way to compute a mixture of experts at once.

    Attributes:
        unsupported_reason: why it cannot compute a mixture with these weights on a target; "" when it can.
        takes_adapters: linears may be adapted ones.
    """

    summary: str
    unsupported_reason: Callable[[Experts, Target], str]
    prepare: Callable[[Experts], ComputeMixture]
    takes_adapters: bool = False


AttentionStep = Callable[[Batch], Attention]
"""Attention of one step, from its batch."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One way to keep keys and values in pages and to attend to them.

    Attributes:
        unsupported_reason: why it cannot serve a model within a memory plan; "" when it can.
        pages: allocates the pages.
        prepare: the attention of every step, from the model, its cache, the sliding window of every layer (None is
            none), and the memory plan.
        verdict: whether measurements put it before others, asked where it supports a model; None for a kernel that
            needs neither them nor a request.
    """

    summary: str
    unsupported_reason: Callable[[Model, MemoryPlan], str]
    pages: Callable[[Model, MemoryPlan], KVPages]
    prepare: Callable[[Model, KVCache, tuple[int | None, ...], MemoryPlan], AttentionStep]
    verdict: Callable[[Model, MemoryPlan], Verdict] | None = None


def _attend_nothing(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise ValueError(f"layer {layer} has attention, and the model has none")


NO_ATTENTION = AttentionKernel(
    "no layer has attention", lambda model, memory: "", make_pages, lambda *_: lambda batch: _attend_nothing
)
"""Attention of models without any: nothing is kept, and nothing is computed."""


class LayersStep(Protocol):
    """`RunLayers` with the attention of the step, made by the same backend."""

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Any) -> Tensor:
        """Hidden states `[T, H]` after all layers, of embeddings `[T, H]`, cosine and signed sine `[T, 1, D]`."""


@dataclass(frozen=True, slots=True)
class LayersKernel:
    """One way to compute all layers of a decoder at once, with the attention of the same backend.

    Attributes:
        prepare: given a model, its cache, the window of every layer, and whether kernels of a GPU shall overlap
            (`ComputeOptions.programmatic_launch`).
        records: its steps of one token per sequence can be captured in CUDA graphs: they launch the same kernels
            whatever is in the batch, change no rows of padding, and never synchronize.
        takes_adapters: linears may be adapted ones.
    """

    summary: str
    unsupported_reason: Callable[[Model, MemoryPlan], str]
    prepare: Callable[[Model, KVCache, tuple[int | None, ...], str], LayersStep]
    records: bool = False
    takes_adapters: bool = False


INFINITE, FORBIDDEN, UNDECIDED = -1, -2, -3
"""Instead of a token: the row is not finite, nothing may be sampled, or another look at the row is needed."""


class SamplingKernel(Protocol):
    """Tokens and log-probabilities from rows of logits in the host's memory."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why it cannot read logits of a dtype on a device; "" when it can."""

    def sample(self, logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
        """The token of each row of `logits [R, V]`, or an outcome, int64 `[R]`, with all that the draws ask for."""

    def logprobs(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities `[R]` of one token per row, and the `K = min(num_top, V)` most likely ids `[R, K]` with
        theirs, of equal ones the lowest id first."""


class Candidates(NamedTuple):
    """The most likely tokens of each row, of which one is drawn.

    Attributes:
        scores: `[R, K]`, over temperature; minus infinity where the token cannot be drawn.
        ids: int64 `[R, K]`.
        unknown: bool `[R]`, whether other tokens may be candidates too.
    """

    scores: Tensor
    ids: Tensor
    unknown: Tensor


class FusedSampling(Protocol):
    """Sampling of all rows in launches that depend on shapes only, so that a CUDA graph can end with them."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        """As `SamplingKernel.unsupported_reason`."""

    def sample(self, logits: Tensor, scores: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        """Writes the token of each row, or an outcome, to int64 `tokens [R]`; greedy where the temperature is 0.

        Args:
            scores: the processed logits `[R, V]`, or `logits` itself.
        """

    def sample_listed(self, listed: Candidates, is_truncated: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        """Replaces the token of each truncated row by one of its candidates, or by `UNDECIDED` where other tokens may
        win."""


Build = Callable[[], object]
"""Compiles one kernel, or reads it from a cache on disk; any thread may call it."""


class Compiler(Protocol):
    """Compiles kernels before the launches that need them."""

    def missing(self, run: Callable[[], None], device: torch.device) -> Sequence[Build]:
        """Calls `run`, whose launches of kernels that are not compiled are left out, and returns these builds."""

    def compile(self, builds: Sequence[Build], device: torch.device, report: Callable[[int, int], None]) -> int:
        """Compiles several at a time, on all cores but one, and returns how many the cache on disk lacked.

        Args:
            device: the one that launches them.
            report: is told how many of how many are done.
        """


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute a model; another backend computes what this one does not support.

    A backend is a subfolder of `runtime.backends` whose package registers it.

    Attributes:
        device: kind of device on which it computes; "" for any.
        linears, dense, states: kernels in order of preference.
        turned: from a linear, the number of its inputs, an order of Hadamard matrices and the target to a linear that
            multiplies its inputs by orthonormal ones first, block by block, and rounds them; None where it does not.
        is_fast: whether it multiplies matrices of a dtype in vectors.
        is_fallback: computes everything, and is asked after all others.
    """

    name: str
    device: str = ""
    linears: tuple[LinearKernel[Any], ...] = ()
    dense: tuple[DenseKernel, ...] = ()
    is_fast: Callable[[torch.dtype], bool] = lambda dtype: False
    ops: OpsKernel | None = None
    turned: Callable[[Linear, int, int, Target], Linear | None] | None = None
    adapted: AdaptedKernel | None = None
    mixture: MixtureKernel | None = None
    states: tuple[StateKernel[Any, Any], ...] = ()
    attention: AttentionKernel | None = None
    latent_heads: LatentHeadsKernel | None = None
    layers: LayersKernel | None = None
    sampling: SamplingKernel | None = None
    fused_sampling: FusedSampling | None = None
    compiler: Compiler | None = None
    is_fallback: bool = False


BACKENDS: Registry[Backend] = Registry("backend", "runtime.backends")
"""Backends in order of preference."""
