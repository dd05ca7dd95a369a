"""Pages in the layout of the compiled attention (`kv_pages.h`): bfloat16 or float32, or codes of 8 and 4 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import QuantizedHeads, dequantize_heads
from compress.cpu.binding import BEST, absence, library, run_job, struct_fields
from runtime.backends.cpu.huge_pages import TouchedAhead, empty
from runtime.backends.kv_pages import BlockField, BlockMemory, layers_by_shape, page_sizes
from runtime.backends.model import Model
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig


def move_token(content: Tensor, name: str, bits: int, block_size: int, source: int, target: int) -> None:
    """Puts what stands at a slot (block * block_size + offset) to another, in all layers.

    Args:
        content: `[layers, blocks, kv_heads, bytes]` of `name`: `keys` or `values`, or their scales `[layers, blocks,
            kv_heads, 2, block_size]`.
        bits: of a number of the keys or values.
    """
    old, new = (content[:, slot // block_size] for slot in (source, target))
    if name == "values" and bits < 16:
        _move_codes(old, new, block_size, bits, source % block_size, target % block_size)
    else:
        _at(new, name, bits, block_size, target % block_size).copy_(
            _at(old, name, bits, block_size, source % block_size)
        )


def _at(block: Tensor, name: str, bits: int, block_size: int, token: int) -> Tensor:
    """A token's words, members or scales."""
    if name == "keys":
        return torch.unflatten(block.view(torch.int32), -1, (-1, block_size))[..., token]
    if name == "values" and bits == 32:
        return torch.unflatten(block.view(torch.int32), -1, (block_size, -1))[..., token, :]
    if name == "values":
        return torch.unflatten(block.view(torch.int16), -1, (block_size // 2, -1, 2))[..., token // 2, :, token % 2]
    return block[..., token]


def _move_codes(old: Tensor, new: Tensor, block_size: int, bits: int, source: int, target: int) -> None:
    """Eight tokens share a word of values; 8 bits are two planes of such words."""
    before, shift = _byte(old, block_size, bits, source)
    after, place = _byte(new, block_size, bits, target)
    after.copy_(after & ~(15 << place) & 255 | (before >> shift & 15) << place)


def _byte(block: Tensor, block_size: int, bits: int, token: int) -> tuple[Tensor, int]:
    """The bytes that hold half of them for a token, and the lower bit of its half."""
    bit = 16 * (token % 2) + 4 * (token % 8 // 2)
    words = block.unflatten(-1, (bits // 4, block_size // 8, -1, 4))
    return words[..., token // 8, :, bit // 8], bit % 8


BLOCK_SIZES = (16, 32, 64, 128, 256)
LONGEST_HEAD = 512
_BITS = {"int8": 8, "int4": 4}
DTYPES = (torch.bfloat16, torch.float32)
_SHIFTS = [16 * (member % 2) + 4 * (member // 2) for member in range(8)]


class PageAddresses(ctypes.Structure):
    """`KvPages` of kv_pages.h: one layer."""

    _fields_ = struct_fields(
        "int64 kv_heads head_dim block_size key_bits value_bits",
        "pointer keys values key_scales value_scales",
    )


class _KvStep(ctypes.Structure):
    """`KvStep` of kv_pages.h."""

    _fields_ = struct_fields(
        "pointer pages",
        "int64 rows heads",
        "pointer slots query key value",
        "int64 query_row key_row value_row",
        "pointer norm",
        "float eps",
        "pointer cos sin",
        "int32 hadamard wide",
    )


def pages_unsupported_reason(
    config: DecoderConfig, scheme: KVCacheScheme, block_size: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Why keys and values cannot be kept like this; empty when they can."""
    if device.type != "cpu":
        return f"runs on CPUs, not on {device.type}"
    if dtype not in DTYPES:
        return f"takes bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if library() is None:
        return absence()
    if not (scheme.is_exact or scheme.key_format in _BITS) or scheme.sinks or scheme.residual_length:
        return f"has no KV cache of the form {scheme}"
    if reason := heads_unsupported_reason(config):
        return reason
    return "" if block_size in BLOCK_SIZES else f"takes blocks of {BLOCK_SIZES} tokens, not {block_size}"


def heads_unsupported_reason(config: DecoderConfig) -> str:
    """Why compiled code cannot compute heads; empty when it can."""
    odd = [dim for dim in config.head_dims if dim % 32 or dim > LONGEST_HEAD]
    return f"takes heads of 32, 64, ... {LONGEST_HEAD} dimensions, not {odd[0]}" if odd else ""


class HugePageMemory(BlockMemory):
    """Storage in huge pages, to which a thread writes ahead of its use."""

    def __init__(
        self, fields: Mapping[str, BlockField], num_layers: int, num_blocks: int, num_host_blocks: int = 0
    ) -> None:
        super().__init__(fields, num_layers, num_blocks, torch.device("cpu"), num_host_blocks, empty)
        self._ahead = TouchedAhead(self.tensors.values())
        self.reach(0)

    def reach(self, num_blocks: int) -> None:
        self._ahead.reach(num_blocks)


class CpuPages:
    """Keys and values as bytes per block and head, and their scales `[2, block_size]` (offsets second) where quantized.

    Each shape of heads has fields of its own, over the layers with that shape which write keys and values.

    Attributes:
        addresses: what every layer reads, for compiled code.
        head_dim: of the first layer with attention.
        sources: layer whose keys and values each layer reads; -1 for none.
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
        self.dtype, self.block_size, self.head_dim = dtype, block_size, config.mixer.head_dim
        self.sources = config.kv_sources
        exact = 8 * dtype.itemsize
        self.bits = {"keys": _BITS.get(scheme.key_format, exact), "values": _BITS.get(scheme.value_format, exact)}
        kinds = layers_by_shape(config)
        self.memory: BlockMemory = HugePageMemory(self._fields(kinds), config.num_layers, num_blocks, num_host_blocks)
        self._contents = {
            layer: self._content(kind, place)
            for kind, layers in enumerate(kinds.values())
            for place, layer in enumerate(layers)
        }
        self.addresses = [self._addresses(config, layer) for layer in self.sources]

    def write(
        self,
        layer: int,
        slots: Tensor,
        key: Tensor,
        value: Tensor,
        queries: Tensor | None = None,
        instruction_set: int = BEST,
    ) -> None:
        """As `KVPages.write`. With `queries [T, heads, D]`, keys are Hadamard-rotated before they are stored, and
        the queries in place. Slots whose values share a word (eight neighbours) must follow each other.

        Raises:
            ValueError: an instruction set that this machine lacks.
        """
        step = _KvStep(
            pages=ctypes.addressof(self.addresses[layer]),
            rows=len(slots),
            slots=slots.data_ptr(),
            key=key.data_ptr(),
            key_row=token_stride(key),
            value=value.data_ptr(),
            value_row=token_stride(value),
            wide=self.dtype == torch.float32,
        )
        if queries is not None:
            step.hadamard, step.heads = True, queries.shape[1]
            step.query, step.query_row = queries.data_ptr(), token_stride(queries)
        run_job("kv_store", step, instruction_set)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._gather("keys", layer, block_ids), self._gather("values", layer, block_ids)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            for field, content in self.memory.tensors.items():
                name, _, _ = field.partition(".")
                move_token(content, name, self.bits.get(name, 16), self.block_size, source, target)

    def _gather(self, name: str, layer: int, block_ids: Tensor) -> Tensor:
        size, dim, contents = self.block_size, self.addresses[layer].head_dim, self._contents[layer]
        content = contents[name].index_select(0, block_ids)
        if self.bits[name] == 32:
            shape = (dim, size, 1) if name == "keys" else (size, dim, 1)
            return _tokens_first(content.view(torch.float32).unflatten(-1, shape), name)
        if self.bits[name] == 16:
            shape = (dim // 2, size, 2) if name == "keys" else (size // 2, dim, 2)
            return _tokens_first(content.view(torch.bfloat16).unflatten(-1, shape), name)
        scale, offset = contents[f"{name}_scales"].index_select(0, block_ids).unbind(-2)
        shape = (-1, dim // 8, size) if name == "keys" else (-1, size // 8, dim)
        words = content.view(torch.int32).unflatten(-1, shape)
        members = torch.stack([words >> shift & 15 for shift in _SHIFTS], -1)
        codes = members.select(-4, 0)
        if self.bits[name] == 8:
            codes = codes + members.select(-4, 1) * 16
        quantized = QuantizedHeads(
            _tokens_first(codes, name).to(torch.uint8),
            *(each.transpose(-1, -2).flatten(0, 1) for each in (scale, offset)),
        )
        return dequantize_heads(quantized, self.dtype)

    def _fields(self, kinds: Mapping[tuple[int, int, int], Sequence[int]]) -> dict[str, BlockField]:
        """Fields by name and number of the shape of heads."""
        fields: dict[str, BlockField] = {}
        for kind, ((kv_heads, *dims), layers) in enumerate(kinds.items()):
            for (name, bits), dim in zip(self.bits.items(), dims, strict=True):
                head_bytes = self.block_size * dim * bits // 8
                fields[f"{name}.{kind}"] = BlockField((kv_heads, head_bytes), torch.uint8, len(layers))
                if bits < 16:
                    scales = BlockField((kv_heads, 2, self.block_size), torch.float16, len(layers))
                    fields[f"{name}_scales.{kind}"] = scales
        return fields

    def _content(self, kind: int, place: int) -> dict[str, Tensor]:
        """Tensors of one layer by name."""
        found = (field.split(".") for field in self.memory.tensors)
        return {name: self.memory.tensors[f"{name}.{kind}"][place] for name, number in found if number == str(kind)}

    def _addresses(self, config: DecoderConfig, layer: int) -> PageAddresses:
        """Those of a layer that writes keys and values; none for -1."""
        if layer < 0:
            return PageAddresses()
        kv_heads, head_dim, _ = config.kv_shapes[layer]
        pointers = {name: tensor.data_ptr() for name, tensor in self._contents[layer].items()}
        return PageAddresses(
            kv_heads,
            head_dim,
            block_size=self.block_size,
            key_bits=self.bits["keys"],
            value_bits=self.bits["values"],
            keys=pointers["keys"],
            values=pointers["values"],
            key_scales=pointers.get("keys_scales"),
            value_scales=pointers.get("values_scales"),
        )


def make_pages(model: Model, memory: MemoryPlan) -> CpuPages:
    """Pages for a memory plan."""
    return CpuPages(model.config, memory.kv_cache, *page_sizes(model, memory))


def token_stride(heads: Tensor) -> int:
    """Elements between tokens of `[T, heads, D]`, whose heads must follow each other."""
    if heads.stride(-1) != 1 or (heads.shape[-2] > 1 and heads.stride(-2) != heads.shape[-1]):
        raise ValueError(f"heads of strides {heads.stride()} do not lie side by side")
    return heads.stride(0)


def _tokens_first(blocks: Tensor, name: str) -> Tensor:
    """`[n * block_size, kv_heads, D]` of words by member: keys `[n, kv_heads, words, tokens, members of D]`, values
    `[n, kv_heads, words, D, members of tokens]`."""
    if name == "keys":
        return blocks.permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)
    return blocks.permute(0, 2, 4, 1, 3).flatten(0, 2)
