"""Protocols and records that every backend implements: linears, ops between them, attention over pages, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme
from compress.models.clamped_gate import ClampedGate
from compress.models.mlp import Mixture
from compress.models.router import Router
from runtime.backends.expert_slots import ExpertSlots
from runtime.backends.indexer import IndexedTokens
from runtime.backends.kv_pages import KVCache, KVPages
from runtime.backends.latent import LatentHeadsKernel, LatentProducts
from runtime.backends.measured import Verdict
from runtime.backends.prepared_weight import Layout
from runtime.backends.sampling_kernel import FusedSampling, SamplingKernel
from runtime.backends.state_kernels import StateKernel
from runtime.backends.state_memory import StepStates
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig

Stored = TypeVar("Stored", contravariant=True)
"""Stored forms of weights that a kernel multiplies by."""


@dataclass(frozen=True, slots=True)
class Target:
    """Device on which products run, and dtype of activations."""

    device: torch.device
    dtype: torch.dtype


class Linear(Protocol):
    """Weight `[O, I]`, perhaps with a bias, prepared for multiplication."""

    @property
    def nbytes(self) -> int:
        """Memory that the prepared weight holds."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> x W^T + bias [M, O]`, in the dtype of `x`."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """Linear whose weight can also be read row by row: a tied head then needs no second copy for the embedding."""

    @property
    def reads_rows(self) -> bool:
        """Whether the layout on this machine allows it."""
        ...

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[T, I]` of the weight, dequantized in `dtype`, for int64 `indices [T]`; a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm over the last dimension with its weights `[H]`.

    Attributes:
        weight: in the dtype of activations, or in float32 where it multiplies before the result is rounded.
        centered: the mean is subtracted first.
        is_plain: root mean square norm with a weight in the dtype of activations.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centered: bool = False
    is_plain: bool = True


def plain_weight(norm: NormWeights | None) -> Tensor:
    """Returns the weight of a root mean square norm. Raises ValueError for another norm, or none."""
    if norm is None or not norm.is_plain:
        raise ValueError(f"{norm} is no plain root mean square norm")
    return norm.weight


class Ops(Protocol):
    """Operations between linears. 16-bit numbers are rounded where transformers rounds them, so that models give the
    same bits, except for sums that are added in another order."""

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds `update [T, H]` to `hidden [T, H]` in place; returns the RMSNorm of the sum, a new tensor."""
        ...

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """RMSNorm with `weight [heads, D]` of every head, if there is one, then the rotary embedding by cosine and
        signed sine `[T, 1, D]`. May change `heads [T, heads, D]` in place and return them."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up [T, I]` of both side by side, `[T, 2 * I]`."""
        ...

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """As `silu_and_mul`, with any activation."""
        ...

    def clamp_and_mul(self, gate_up: Tensor, gate: ClampedGate) -> Tensor:
        """As `silu_and_mul`, with a clamped gate."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x)`, a new tensor."""
        ...

    def normalize(self, hidden: Tensor, norm: NormWeights) -> Tensor:
        """Any norm of `hidden [..., H]`, a new tensor."""
        ...


class Rotary(Protocol):
    """Rotary embedding of a model."""

    def by(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosine and signed sine `[T, 1, D]` that move rotated heads by int64 `distances [T]`."""
        ...


class Attention(Protocol):
    """Attention of one step, which also stores its keys and values. One object serves all layers."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output `[T, heads, D]` of query `[T, heads, D]`, key and value `[T, kv_heads, D]`."""
        ...


@runtime_checkable
class SparseAttention(Attention, Protocol):
    """Attention that can leave out tokens."""

    def choose(self, layer: int, tokens: IndexedTokens) -> None:
        """Stores the index keys of a layer, and chooses the tokens that it sees, and later ones without an indexer."""
        ...


RunLayers = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From embeddings `[T, H]`, cosine and signed sine `[T, 1, D]` to hidden states `[T, H]`; may overwrite the first."""


class ExpertWeights(Protocol):
    """Weights of one MLP."""

    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...


class ComputeMixture(Protocol):
    """A whole mixture."""

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; the router reads `routed [T, H]` if that is given."""
        ...


class MixtureWeights(Protocol):
    """Weights of a mixture of experts, described at `Experts`."""

    @property
    def router(self) -> Router: ...
    @property
    def scores(self) -> Tensor: ...
    @property
    def experts(self) -> Sequence[ExpertWeights]: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def shared(self) -> ExpertWeights | None: ...
    @property
    def shared_gate(self) -> Tensor | None: ...
    @property
    def scores_bias(self) -> Tensor | None: ...
    @property
    def expert_scales(self) -> Tensor | None: ...
    @property
    def kernel(self) -> ComputeMixture | None: ...
    @property
    def slots(self) -> ExpertSlots | None: ...

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts for `x [T, H]`: their weights `[T, k]`, and int64 experts `[T, k]`."""
        ...


class LayerWeights(Protocol):
    """Weights of one decoder layer, as kernels that compute whole layers read them."""

    @property
    def attention_norm(self) -> NormWeights | None: ...
    @property
    def qkv(self) -> Linear | None: ...
    @property
    def head_norm(self) -> Tensor | None: ...
    @property
    def output(self) -> Linear | None: ...
    @property
    def mlp_norm(self) -> NormWeights | None: ...
    @property
    def gate_up(self) -> Linear | None: ...
    @property
    def down(self) -> Linear | None: ...
    @property
    def experts(self) -> MixtureWeights | None: ...
    @property
    def sink_logits(self) -> Tensor | None: ...
    @property
    def latent_heads(self) -> LatentProducts | None: ...


def attention_linears(layer: LayerWeights) -> tuple[Linear, Linear]:
    """Returns both linears of a layer's attention. Raises ValueError for a layer with a state."""
    if layer.qkv is None or layer.output is None:
        raise ValueError("a layer with a state is no attention")
    return layer.qkv, layer.output


def mlp_linears(layer: LayerWeights) -> tuple[Linear, Linear]:
    """Returns both linears of a layer's MLP. Raises ValueError for a mixture."""
    if layer.gate_up is None or layer.down is None:
        raise ValueError("a mixture of experts is no MLP")
    return layer.gate_up, layer.down


class Model(Protocol):
    """Decoder as backends see it."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def layers(self) -> Sequence[LayerWeights]: ...
    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a model whose layers all have the same one."""
        ...

    @property
    def ops(self) -> Ops: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Hidden states `[T, H]` before the final norm; `states` are those of recurrent layers."""
        ...


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
class MixtureKernel:
    """One way to compute a mixture of experts at once.

    Attributes:
        unsupported_reason: why it cannot compute a mixture with these weights on a target; "" when it can.
    """

    summary: str
    unsupported_reason: Callable[[Mixture, MixtureWeights, Target], str]
    prepare: Callable[[Mixture, MixtureWeights], ComputeMixture]


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


class LayersStep(Protocol):
    """`RunLayers` with the attention of the step, made by the same backend."""

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Any) -> Tensor:
        """Hidden states `[T, H]` after all layers, of embeddings `[T, H]`, cosine and signed sine `[T, 1, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class LayersKernel:
    """One way to compute all layers of a decoder at once, with the attention of the same backend.

    Attributes:
        prepare: given a model, its cache, the window of every layer, and whether kernels of a GPU shall overlap
            (`ComputeOptions.programmatic_launch`).
        records: its steps of one token per sequence can be captured in CUDA graphs: they launch the same kernels
            whatever is in the batch, leave rows of padding alone, and wait for nothing.
    """

    summary: str
    unsupported_reason: Callable[[Model, MemoryPlan], str]
    prepare: Callable[[Model, KVCache, tuple[int | None, ...], str], LayersStep]
    records: bool = False


Build = Callable[[], object]
"""Compiles one kernel, or reads it from a cache on disk; any thread may call it."""


class Compiler(Protocol):
    """Compiles kernels before the launches that need them."""

    def missing(self, run: Callable[[], None], device: torch.device) -> Sequence[Build]:
        """Calls `run`, whose launches of kernels that are not compiled are left out, and returns these builds."""
        ...

    def compile(self, builds: Sequence[Build], device: torch.device, report: Callable[[int, int], None]) -> int:
        """Compiles several at a time, on all cores but one, and returns how many the cache on disk lacked.

        Args:
            device: the one that launches them.
            report: is told how many of how many are done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute a model; another backend computes what this one does not support.

    A backend is a folder beside this file whose package registers it.

    Attributes:
        device: kind of device on which it computes; "" for any.
        linears, dense, states: kernels in order of preference.
        is_fast: whether it multiplies matrices of a dtype in vectors.
        is_fallback: computes everything, and is asked after all others.
    """

    name: str
    device: str = ""
    linears: tuple[LinearKernel[Any], ...] = ()
    dense: tuple[DenseKernel, ...] = ()
    is_fast: Callable[[torch.dtype], bool] = lambda dtype: False
    ops: OpsKernel | None = None
    mixture: MixtureKernel | None = None
    states: tuple[StateKernel[Any, Any], ...] = ()
    attention: AttentionKernel | None = None
    latent_heads: LatentHeadsKernel | None = None
    layers: LayersKernel | None = None
    sampling: SamplingKernel | None = None
    fused_sampling: FusedSampling | None = None
    compiler: Compiler | None = None
    is_fallback: bool = False


BACKENDS: list[Backend] = []
"""The registered backends in order of preference. `runtime.backends.registry` imports those of this package."""


def register(backend: Backend) -> None:
    """Adds a backend that is preferred to those before it, fallbacks excepted, or replaces the one of the same name."""
    unregister(backend.name)
    BACKENDS.insert(len(BACKENDS) if backend.is_fallback else 0, backend)


def unregister(name: str) -> None:
    """Removes a backend, if it is there."""
    BACKENDS[:] = [backend for backend in BACKENDS if backend.name != name]
