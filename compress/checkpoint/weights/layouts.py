"""Layouts of the stored tensors of codes under scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from compress.checkpoint.weights.base import StoredTensors
from compress.checkpoint.weights.coded import EXPONENTS, FLOAT8, FLOAT8_SCALES, INTEGERS, TABLE, Coded, CodedWeight
from compress.checkpoint.weights.packing import pack_bytes, unpack_bytes
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PackedCodes(Coded):
    """Codes that are places in a table, as bytes of one little-endian stream of bits for each row."""

    __slots__ = ()
    suffixes: ClassVar[tuple[str, ...]] = (".weight_packed", ".weight_scale")
    mark = ".weight_scale"
    numbers = TABLE
    DIVISOR: ClassVar[str] = ".weight_global_scale"

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, groups = stored[".weight_scale"].shape
        return rows, groups * (self.group_size or 1)

    def read(self, stored: StoredTensors) -> CodedWeight:
        """Reads bytes `[O, I * bits / 8]`, or `[O, G, group * bits / 8]`, and what scales them."""
        packed, scales = stored[".weight_packed"], stored[".weight_scale"]
        divisor = stored[self.DIVISOR] if self.scales.divisor_bits else None
        check_dtypes(stored.module, self, packed, scales, divisor)
        if divisor is not None:
            divisor = divisor.reshape(1, 1).repeat(len(packed), 1)
        codes = unpack_bytes(packed.flatten(1), self.bits)
        return CodedWeight(codes, scales, self, divisors=divisor)

    def tensors(self, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        packed, scales = pack_bytes(weight.qweight, self.bits), self.stored_scales(weight, dtype)
        stored = {".weight_packed": packed, ".weight_scale": scales}
        if weight.divisors is None:
            return stored
        if bool((weight.divisors != weight.divisors[0]).any()):
            raise SchemeError(
                f"rows with several global scales are not one {self.word} weight", "Store them one by one"
            )
        return {**stored, self.DIVISOR: weight.divisors[0].clone()}


class ByteFloats(Coded):
    """Bytes of 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa), none of them NaN."""

    __slots__ = ()
    suffixes = (".weight", ".weight_scale")
    mark = ".weight_scale"
    bits = 8
    numbers = FLOAT8
    structure = ""
    readers = ""
    is_exact_size = False

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> CodedWeight:
        codes, scales = stored[".weight"], stored[".weight_scale"]
        check_float_codes(stored.module, codes)
        check_dtypes(stored.module, self, None, scales)
        return CodedWeight(codes, self.repeated(scales, codes.shape), self)

    def tensors(self, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {".weight": weight.qweight.contiguous(), ".weight_scale": self.stored_scales(weight, dtype)}


class Blocks(Coded):
    """Codes with float16 scales, stored as the blocks of a GGUF file."""

    __slots__ = ()
    SUFFIX: ClassVar[str] = ".weight_blocks"
    suffixes = (SUFFIX,)
    mark = SUFFIX
    numbers = INTEGERS
    structure = "the blocks"
    readers = "is read by this runtime; `compress export --format gguf` writes the same blocks for llama.cpp"

    @property
    def title(self) -> str:
        return self.word

    @property
    def block_bytes(self) -> int:
        return self.stored_bits(1, self.block_size) // 8

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, row_bytes = stored[self.SUFFIX].shape
        return rows, row_bytes // self.block_bytes * self.block_size

    def read(self, stored: StoredTensors) -> CodedWeight:
        blocks = stored[self.SUFFIX]
        if str(blocks.dtype) != "torch.uint8" or blocks.dim() != 2 or blocks.shape[1] % self.block_bytes:
            raise CheckpointError(
                f"{stored.module} should hold rows of blocks of {self.block_bytes} bytes, not {blocks.dtype} "
                f"{list(blocks.shape)}"
            )
        return self.from_blocks(blocks)

    def from_blocks(self, blocks: Tensor) -> CodedWeight:
        """The weight of GGUF blocks, uint8 `[O, bytes of a row]`."""
        from compress.checkpoint.gguf.types import CODECS

        return self.of(CODECS[self.word].split(blocks.reshape(-1, self.block_bytes)).named(), len(blocks))

    def of(self, parts: Mapping[str, Tensor], rows: int) -> CodedWeight:
        """The weight `[rows, I]` of the parts of blocks in the order of its rows."""
        by_row = {name: part.reshape(rows, -1) for name, part in parts.items()}
        return CodedWeight(scheme=self, **by_row)

    def blocks(self, weight: CodedWeight) -> Tensor:
        """The blocks of a GGUF file, uint8 `[O, bytes of a row]`."""
        from compress.checkpoint.gguf.types import CODECS
        from compress.checkpoint.gguf.types.base import BlockParts

        rows, columns = weight.shape
        count = rows * self.num_blocks(columns)
        by_row = cast("dict[str, Tensor]", weight.named_parts())
        parts = {name: part.reshape(count, part.numel() // max(1, count)) for name, part in by_row.items()}
        return CODECS[self.word].join(BlockParts(**parts)).reshape(rows, -1)

    def tensors(self, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {self.SUFFIX: self.blocks(weight)}


def check_dtypes(
    module: str, scheme: Coded, packed: Tensor | None, scales: Tensor, divisor: Tensor | None = None
) -> None:
    """Raises CheckpointError unless packed codes are rows of bytes, scales what the form has, and a divisor one number
    in float32."""
    import torch

    wanted = getattr(torch, scheme.scales.dtype) if scheme.scales.dtype in (EXPONENTS, FLOAT8_SCALES) else None
    fits = scales.dtype == wanted if wanted else scales.is_floating_point()
    if packed is not None:
        fits = fits and packed.dtype == torch.uint8 and packed.dim() >= 2
    if divisor is not None:
        fits = fits and (divisor.dtype, divisor.numel()) == (torch.float32, 1)
    if not fits:
        kinds = [f"{part.dtype} {list(part.shape)}" for part in (packed, scales, divisor) if part is not None]
        raise CheckpointError(f"{module} should hold codes and scales of {scheme}, not {', '.join(kinds)}")


def check_float_codes(module: str, codes: Tensor) -> None:
    """Raises CheckpointError unless the codes of a module are finite 8-bit floats."""
    import torch

    if codes.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{module}.weight should hold 8-bit floats (e4m3), but is {codes.dtype}")
    if bad := int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise CheckpointError(f"{module}.weight holds {bad} NaN codes", "Quantize it again")
