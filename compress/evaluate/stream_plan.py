"""Memory, disk and time of a streamed evaluation, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.speed import product_speed
from compress.evaluate.perplexity import BATCH_LOGITS
from compress.models.block import Block
from compress.models.linear import Linear
from compress.models.spec import ModelSpec
from runtime.backends.base import Target

_PROCESS_BYTES = 700 * 2**20
_LOGIT_BYTES = 4
_LOGIT_COPIES = 6
"""Copies of the logits of a batch: those of both models, their logarithms, and what their divergence is made of."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, or all tensors of one packed weight.

    Attributes:
        numbers: of its values.
        nbytes: in the file.
        is_packed: whether it computes as it is stored; others are converted to the dtype of activations.
    """

    name: str
    numbers: int
    nbytes: int
    is_packed: bool

    def in_memory(self, itemsize: int) -> PartBytes:
        """Returns its bytes where activations take `itemsize` bytes each."""
        return PartBytes(self.nbytes, self.nbytes if self.is_packed else self.numbers * itemsize)


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Memory of a part of a model.

    Attributes:
        mapped: pages of the file, until the part is prepared.
        prepared: what its kernels read.
    """

    mapped: int = 0
    prepared: int = 0

    def __add__(self, other: PartBytes) -> PartBytes:
        return PartBytes(self.mapped + other.mapped, self.prepared + other.prepared)


def stored_tensors(checkpoint: PackedCheckpoint) -> Iterator[StoredTensor]:
    """Yields the tensors of a checkpoint from its headers."""
    files = checkpoint.files
    for module in checkpoint.modules:
        nbytes = sum(files.tensor_nbytes(name) for name in checkpoint.packed_names(module))
        yield StoredTensor(module, math.prod(checkpoint.shape(module)), nbytes, True)
    for name in checkpoint.dense_names():
        yield StoredTensor(name, math.prod(files.shape(name)), files.tensor_nbytes(name), False)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model on its way through memory."""

    read_bytes: int
    layer: PartBytes
    head: PartBytes

    @classmethod
    def of(cls, spec: ModelSpec, tensors: Iterable[StoredTensor], itemsize: int) -> ModelCost:
        """Adds up the parts of a model whose activations take `itemsize` bytes."""
        listed = {each.name.removesuffix(".weight"): each for each in tensors}
        layers = dict.fromkeys((spec.block_name(index) for index in range(len(spec.blocks))), PartBytes())
        depth = spec.names.blocks.count(".") + 2
        for each in listed.values():
            name = ".".join(each.name.split(".")[:depth])
            if name in layers:
                layers[name] += each.in_memory(itemsize)
        largest = max(layers.values(), key=lambda part: part.prepared)
        heads = (listed[name] for name in (spec.names.head, spec.names.embedding) if name in listed)
        head = next((each.in_memory(itemsize) for each in heads), PartBytes())
        return cls(sum(each.nbytes for each in listed.values()), largest, head)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A streamed evaluation.

    Attributes:
        models: the model, and the baseline where there is one.
        tokens: that pass through all models together.
        part_tokens: of one forward pass.
    """

    spec: ModelSpec
    models: tuple[ModelCost, ...]
    tokens: int
    part_tokens: int
    length: int
    target: Target

    @property
    def itemsize(self) -> int:
        return self.target.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Weights, each of which is read once."""
        return sum(model.read_bytes for model in self.models)

    @property
    def disk_bytes(self) -> int:
        """Hidden states, and updates that are left to add to them."""
        return 2 * self.tokens * self.spec.hidden_size * self.itemsize

    @property
    def peak_memory(self) -> int:
        """Estimates the bytes at the worst moment: a layer with the activations of a forward pass, or both heads with
        logits."""
        widest = max(sum(linear.out_features for linear in _computed(block)) for block in self.spec.blocks)
        activations = self.part_tokens * self.itemsize * (6 * self.spec.hidden_size + 2 * widest)
        layer = max(each.layer.prepared + max(each.layer.mapped, activations) for each in self.models)
        logits = max(BATCH_LOGITS, self.spec.vocab_size) * max(self.itemsize, _LOGIT_BYTES)
        beside = max(_LOGIT_COPIES * logits, *(each.head.mapped for each in self.models))
        return _PROCESS_BYTES + max(layer, sum(each.head.prepared for each in self.models) + beside)

    @property
    def operations(self) -> float:
        """Floating point operations of all products."""
        linears = sum(math.prod(linear.shape) for block in self.spec.blocks for linear in _computed(block))
        attended = sum(mixer.num_heads * mixer.head_dim for mixer in self.spec.attentions) * self.length
        return 2.0 * self.tokens * (linears + attended + math.prod(self.spec.head.shape))

    def seconds(self) -> float:
        """Estimates the time of products by the speed that the device has now."""
        return self.operations / product_speed(self.target.device, self.target.dtype)

    def describe(self) -> str:
        """Returns all of it in one line."""
        return (
            f"{self.tokens:,} tokens through {len(self.spec.blocks)} layers of {len(self.models)} models, one layer in "
            f"memory at a time: {_gigabytes(self.read_bytes)} of weights are read, about "
            f"{_gigabytes(self.peak_memory)} of memory and {_gigabytes(self.disk_bytes)} of disk, "
            f"{self.operations / 1e12:,.1f} TFLOP: about {_duration(self.seconds())} at the speed of dense "
            "products on this device, and what reading takes"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of `--dry-run --json`."""
        return {
            "tokens": self.tokens,
            "read_bytes": self.read_bytes,
            "peak_memory_bytes": self.peak_memory,
            "disk_bytes": self.disk_bytes,
            "operations": self.operations,
            "seconds": self.seconds(),
        }


def _computed(block: Block) -> list[Linear]:
    """Linears that compute for each token: of a mixture, as many experts as are chosen."""
    mixture = block.mixture
    others = () if mixture is None else mixture.experts[mixture.router.num_chosen :]
    left_out = {linear.name for expert in others for linear in expert.linears}
    return [linear for linear in block.linears if linear.name not in left_out]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"


def _duration(seconds: float) -> str:
    """Returns seconds below two minutes, then minutes, and hours from two on."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
