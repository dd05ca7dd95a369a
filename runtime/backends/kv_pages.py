"""Memory in blocks, for any layout of keys and values: named tensors whose blocks move as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import CODE_BITS, EXACT, METADATA_BITS, KVCacheScheme
from compress.checkpoint.kv_quant import QuantizedHeads, dequantize_heads, quantize_heads, rotate_heads
from runtime.backends.exact_tokens import ResidualWindow, SinkStore
from runtime.backends.model import Model
from runtime.core.batch import upload
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig
from runtime.core.step import BlockCopy, BlockOffload, BlockRestore, ScheduledSequence


@dataclass(frozen=True, slots=True)
class BlockField:
    """Part of a layout: a tensor of this shape for each block of each layer, or of `num_layers` of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_layers: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class BlockMemory:
    """Storage for `num_blocks` blocks in every layer, and for some more in host memory.

    Memory is not initialized. Invariant: a slot that attention may read was written, or was cleared when its block was
    taken into use; so what an earlier owner left (even NaN) never reaches another sequence. Hence a layout must read
    bytes that are all zero as finite numbers.

    Args:
        fields: what a block consists of, by name.
        allocate: makes the tensors on the device, of a shape and a dtype; by default torch.

    Attributes:
        tensors: by name, `[layers, num_blocks, *shape]`.
        host: by name, `[num_host_blocks, layers, *shape]`, in pinned memory where the device is a GPU.
    """

    def __init__(
        self,
        fields: Mapping[str, BlockField],
        num_layers: int,
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        make = allocate or partial(_empty, device)
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.num_blocks, self.device = num_blocks, device
        layers = {name: num_layers if field.num_layers is None else field.num_layers for name, field in fields.items()}
        self.tensors = {
            name: make((layers[name], num_blocks, *field.shape), field.dtype) for name, field in fields.items()
        }
        self.host = {
            name: torch.empty((num_host_blocks, layers[name], *field.shape), dtype=field.dtype, pin_memory=pinned)
            for name, field in fields.items()
        }

    @property
    def nbytes(self) -> int:
        """On the device, host memory left out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def reach(self, num_blocks: int) -> None:
        """Is told before a step that sequences have blocks among the first `num_blocks`."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks to others, all read before any is written.

        The entries after a copy's `num_tokens` were written or cleared for its source, so they are as good as zeros.
        """
        if not copies:
            return
        sources = upload((copy.source for copy in copies), self.device)
        targets = upload((copy.target for copy in copies), self.device)
        for tensor in self.tensors.values():
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves single tokens between slots (block * block_size + offset), all read before any is written; for layouts
        whose fields begin with the tokens of a block."""
        read, written = upload(sources, self.device), upload(targets, self.device)
        for tensor in self.tensors.values():
            slots = tensor.flatten(1, 2)
            slots.index_copy_(1, written, slots.index_select(1, read))

    def offload(self, offloads: Iterable[BlockOffload]) -> None:
        """Saves blocks in host memory. Only `restore` reads it, on the same stream, so no synchronization is needed."""
        for offload in offloads:
            for name, tensor in self.tensors.items():
                self.host[name][offload.slot].copy_(tensor[:, offload.block].contiguous(), non_blocking=True)

    def restore(self, restores: Iterable[BlockRestore]) -> None:
        """Fills blocks with what was saved."""
        for restore in restores:
            for name, tensor in self.tensors.items():
                tensor[:, restore.block] = self.host[name][restore.slot].to(tensor.device, non_blocking=True)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros, in every layer. One after the other: on a CPU that takes a tenth of the time of an
        index, and for a GPU no index has to cross."""
        for tensor in self.tensors.values():
            for block_id in block_ids:
                tensor[:, block_id].zero_()


class KVPages(Protocol):
    """A layout of keys and values over a block memory.

    A backend with a layout of its own chooses the fields of its memory and their order; copying, clearing, saving in
    host memory and restoring are the memory's and work for any fields. Its numbers follow the scheme
    (`compress.checkpoint.kv_quant`), so that all layouts hold the same codes. A slot is written once; after that its
    content moves with its block, or alone where a branch of draft tokens is accepted. An attention that reads
    `memory.tensors` itself needs `gather` for tests only. It stores keys as they come, rotated (`KVCache.rotate`) or
    not.

    Attributes:
        memory: the blocks.
        dtype: of what is written and gathered.
    """

    memory: BlockMemory
    dtype: torch.dtype

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value `[T, kv_heads, D]`, at int64 slots `[T]`; slot = block id * block_size
        + offset."""

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[n * block_size, kv_heads, D]` of blocks `[n]`, in their order, as copies."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Puts what stands at some slots to others, in all layers. No target is the source of a later move."""


def layers_by_shape(config: DecoderConfig) -> dict[tuple[int, int, int], list[int]]:
    """Layers that write keys and values, by key-value heads and the dimensions of a key and of a value."""
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for layer, shape in enumerate(config.kv_shapes):
        if config.kv_sources[layer] == layer:
            kinds.setdefault(shape, []).append(layer)
    return kinds


class TokenPages:
    """Pages in the layouts of plain torch: the fields of a block begin with its tokens.

    Each shape of heads has fields of its own, over the layers with that shape which write keys and values. Latent
    attention keeps its rotated keys as keys, and its latents as values.
    In 16 bits `keys` and `values` are `[block_size, kv_heads, D]` in the model's dtype. Quantized, codes are
    `[block_size, kv_heads, bytes]` with scales `[block_size, kv_heads, 1 or 2]` (with an offset, if there is
    one), and what is gathered is dequantized. Codes of 4 bits lie two in a byte: dimension d in the low half of byte d,
    d + D / 2 in its high half.
    """

    def __init__(
        self,
        config: DecoderConfig,
        scheme: KVCacheScheme,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.dtype, self.block_size, formats = (
            dtype,
            block_size,
            {"key": scheme.key_format, "value": scheme.value_format},
        )
        kinds = layers_by_shape(config)
        fields: dict[str, BlockField] = {}
        for kind, ((kv_heads, *dims), layers) in enumerate(kinds.items()):
            for (name, format), dim in zip(formats.items(), dims, strict=True):
                places = (block_size, kv_heads)
                fields |= _fields(_field_name(name, kind), format, places, dim, dtype, len(layers))
        indexed = [layer for layer, dim in enumerate(config.index_dims) if dim]
        if indexed:
            shape = block_size, max(config.index_dims)
            fields["index_keys"] = BlockField(shape, dtype, len(indexed))
        self.memory = BlockMemory(fields, config.num_layers, num_blocks, device, num_host_blocks)
        self._index_keys = {layer: self.memory.tensors["index_keys"][place] for place, layer in enumerate(indexed)}
        self._parts: dict[int, list[_ExactPart | _QuantizedPart]] = {
            layer: [self._part(_field_name(name, kind), format, place) for name, format in formats.items()]
            for kind, layers in enumerate(kinds.values())
            for place, layer in enumerate(layers)
        }

    def _part(self, name: str, format: str, place: int) -> _ExactPart | _QuantizedPart:
        tensors = self.memory.tensors
        if format == EXACT:
            return _ExactPart(tensors[f"{name}s"][place])
        return _QuantizedPart(tensors[f"{name}_codes"][place], tensors[f"{name}_scales"][place], format, self.dtype)

    def stored(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Keys and values of a layer that writes them, and their scales; in 16 bits themselves again."""
        key, value = self._parts[layer]
        return (key.codes, value.codes), (key.scales, value.scales)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        for part, heads in zip(self._parts[layer], (key, value), strict=True):
            part.write(slots, heads)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._parts[layer]
        return key.gather(block_ids), value.gather(block_ids)

    def gather_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[n, kv_heads, D]` at int64 slots `[n]`, as copies."""
        key, value = self._parts[layer]
        return key.gather_slots(slots), value.gather_slots(slots)

    def write_index(self, layer: int, slots: Tensor, key: Tensor) -> None:
        """Stores index keys `[T, D]` of a layer with an indexer, at int64 slots `[T]`."""
        self._index_keys[layer].flatten(0, 1).index_copy_(0, slots, key)

    def gather_index(self, layer: int, block_ids: Tensor) -> Tensor:
        """Index keys `[n * block_size, D]` of blocks `[n]`, in their order, as a copy."""
        return self._index_keys[layer].index_select(0, block_ids).flatten(0, 1)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.memory.move_tokens(sources, targets)


def _field_name(name: str, kind: int) -> str:
    return name if not kind else f"{name}{kind}_"


def _fields(
    name: str, format: str, places: tuple[int, int], head_dim: int, dtype: torch.dtype, num_layers: int
) -> dict[str, BlockField]:
    """Fields of keys, or of values, of layers with one shape of heads."""
    if format == EXACT:
        return {f"{name}s": BlockField((*places, head_dim), dtype, num_layers)}
    return {
        f"{name}_codes": BlockField((*places, head_dim * CODE_BITS[format] // 8), torch.uint8, num_layers),
        f"{name}_scales": BlockField((*places, METADATA_BITS[format] // 16), torch.float16, num_layers),
    }


class _ExactPart:
    """Keys, or values, of a layer in the model's dtype; they are their own scales."""

    def __init__(self, heads: Tensor) -> None:
        self.codes = self.scales = heads
        self._slots = heads.flatten(0, 1)

    def write(self, slots: Tensor, heads: Tensor) -> None:
        self._slots.index_copy_(0, slots, heads)

    def gather(self, block_ids: Tensor) -> Tensor:
        return self.codes.index_select(0, block_ids).flatten(0, 1)

    def gather_slots(self, slots: Tensor) -> Tensor:
        return self._slots.index_select(0, slots)


@dataclass(frozen=True, slots=True)
class _QuantizedPart:
    """Keys, or values, of a layer as codes with their scales; `dtype` is that of what is gathered."""

    codes: Tensor
    scales: Tensor
    format: str
    dtype: torch.dtype

    def write(self, slots: Tensor, heads: Tensor) -> None:
        quantized = quantize_heads(heads, self.format)
        metadata = [quantized.scale] if quantized.offset is None else [quantized.scale, quantized.offset]
        codes = pack_halves(quantized.codes) if CODE_BITS[self.format] == 4 else quantized.codes
        self.codes.flatten(0, 1).index_copy_(0, slots, codes)
        self.scales.flatten(0, 1).index_copy_(0, slots, torch.stack(metadata, -1))

    def gather(self, block_ids: Tensor) -> Tensor:
        return self._read(*(part.index_select(0, block_ids).flatten(0, 1) for part in (self.codes, self.scales)))

    def gather_slots(self, slots: Tensor) -> Tensor:
        return self._read(*(part.flatten(0, 1).index_select(0, slots) for part in (self.codes, self.scales)))

    def _read(self, codes: Tensor, scales: Tensor) -> Tensor:
        scale, *offset = scales.unbind(-1)
        codes = unpack_halves(codes) if CODE_BITS[self.format] == 4 else codes
        return dequantize_heads(QuantizedHeads(codes, scale, offset[0] if offset else None), self.dtype)


def pack_halves(codes: Tensor) -> Tensor:
    """4-bit codes `[..., D]` as bytes `[..., D / 2]`."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpack_halves(codes: Tensor) -> Tensor:
    """The inverse of `pack_halves`."""
    return torch.cat((codes & 15, codes >> 4), -1)


def page_sizes(model: Model, memory: MemoryPlan) -> tuple[int, int, torch.dtype, torch.device, int]:
    """Blocks, tokens of a block, dtype, device and blocks in host memory: the last arguments of a layout."""
    return memory.num_blocks, memory.block_size, model.dtype, model.device, memory.num_host_blocks


def make_pages(model: Model, memory: MemoryPlan) -> TokenPages:
    """Pages in the layouts of plain torch."""
    return TokenPages(model.config, memory.kv_cache, *page_sizes(model, memory))


@dataclass(frozen=True, slots=True)
class ExactPlaces:
    """Where the sequences of a step have their exact keys and values: int64 `[entries]`, or None without any."""

    sinks: Tensor | None
    rings: Tensor | None


class KVCache:
    """Keys and values of all sequences of a runner, in the form that its scheme says.

    Args:
        memory: the scheme, and how many sequences have exact tokens.
        windows: sliding window of every layer; None is none.

    Attributes:
        sources: layer whose keys and values each layer reads.
    """

    def __init__(
        self, config: DecoderConfig, memory: MemoryPlan, pages: KVPages, windows: tuple[int | None, ...]
    ) -> None:
        self.scheme: KVCacheScheme = memory.kv_cache
        self.pages, self.sources = pages, config.kv_sources
        sinks, recent, num_sequences = self.scheme.sinks, self.scheme.residual_length, memory.exact.num_sequences
        # Where the whole model has a window, the exact sinks are tokens that all tokens see.
        windows = windows if memory.attention_window.window is None else (None,) * config.num_layers
        dtype, device = pages.dtype, pages.memory.device
        self.sinks = SinkStore(config, sinks, num_sequences, self.rotate, windows, dtype, device) if sinks else None
        self.residual_window = ResidualWindow(config, recent, num_sequences, dtype, device) if recent else None

    def rotate(self, heads: Tensor) -> Tensor:
        """Query or key heads `[..., D]`, after RoPE, in the basis in which keys are stored."""
        return rotate_heads(heads) if self.scheme.rotate else heads

    def place(self, decoder: Model, entries: Sequence[ScheduledSequence]) -> ExactPlaces:
        """Makes ready what is exact for a step's entries, in their order. May run the decoder over a few tokens."""
        return ExactPlaces(
            None if self.sinks is None else self._tensor(self.sinks.place(decoder, entries)),
            None if self.residual_window is None else self._tensor(self.residual_window.place(entries)),
        )

    def _tensor(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.pages.memory.device)
