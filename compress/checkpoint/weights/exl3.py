"""Trellis codes of exllamav3 (EXL3), after QTIP (Tseng et al. 2024, https://arxiv.org/abs/2406.11235).

A tile of 16 x 16 values is one cyclic stream of 256 codes of `bits` bits; with half bits, every other code has one bit
more. Each value follows from the 16 bits that end with its code, by arithmetic that stands in for a codebook (section
3.1), and the tiles are turned by Hadamard matrices of order 128 between scales of inputs and outputs: `W^T = diag(suh)
H tiles H diag(svh) / 128`. Sides that are not multiples of 128 are padded to the next one: then codes stand for more
rows and columns than the weight has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Headers, Scheme, as_width, register
from compress.checkpoint.weights.base import StoredTensors, Weight, scale_problems
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TILE, TURN = 16, 128
"""Sides of a tile and of a Hadamard matrix."""
CODES = TILE * TILE
STATE_BITS, WORD_BITS = 16, 16
PAIR_WORDS = CODES // 2 // WORD_BITS
"""Words of a tile for each bit of two codes."""
MAX_BITS, MAX_HALVES = 8, 4.5
"""The widest codes, and the widest ones of half bits."""
DEFAULT_CODEBOOK = "3inst"
HALVES_CODEBOOK = "mul1"
"""The only codebook of rates with half bits."""
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Multipliers of states by codebook, stored in a tensor of its name; that of the default one is not stored."""
CODEBOOKS = (DEFAULT_CODEBOOK, *MULTIPLIERS)


@register("exl3")
@dataclass(frozen=True, slots=True)
class Exl3(Scheme):
    """Trellis codes of `bits` bits, a whole number or a half more, under one of three codebooks.

    Raises:
        SchemeError: another width or codebook.
    """

    bits: float = 4
    codebook: str = DEFAULT_CODEBOOK

    suffixes = (".trellis", ".suh", ".svh", ".su", ".sv", *(f".{name}" for name in MULTIPLIERS))
    mark = ".trellis"
    fuses = False
    is_exact_size = True
    structure = "the trellis codes"
    holds_zeros = False
    word = "exl3"
    note = "weights in EXL3 are read by this runtime and exllamav3; others read `compress export --format dense`"

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS or 2 * self.bits not in pair_widths(self.codebook):
            raise SchemeError(
                f"EXL3 has 1 to {MAX_BITS} bits and the codebooks {', '.join(CODEBOOKS)}, half bits up to {MAX_HALVES} "
                f"with {HALVES_CODEBOOK} alone, not {self.bits} bits of {self.codebook}"
            )
        object.__setattr__(self, "bits", as_width(self.bits))

    @classmethod
    def target(cls) -> Exl3:
        return cls(codebook="mul1")

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> Exl3Weight:
        """Encodes a weight without error feedback; `importance` and `scale_dtype` have no effect."""
        from compress.checkpoint.trellis_search import encode_trellis

        return encode_trellis(weight, self)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        multiplier = 32 if self.codebook in MULTIPLIERS else 0
        return self.code_bits(out_features, in_features) + (out_features + in_features) * 16 + multiplier

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return self.code_bits(out_features, in_features) // 8 + (out_features + in_features) * 2

    def code_bits(self, out_features: int, in_features: int) -> int:
        """Bits of the codes of a weight `[O, I]`, those of the padding of its sides included."""
        return padded(out_features) * padded(in_features) * self.pair_bits // 2

    @property
    def pair_bits(self) -> int:
        """Bits of two codes; the first of them has half of these, rounded down."""
        return int(2 * self.bits)

    @property
    def numbers(self) -> str:
        return self.key

    column_multiple = 0

    def __str__(self) -> str:
        return f"w{self.bits}a16 exl3 {self.codebook}"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, self.key: self.codebook}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Exl3:
        if fields.get("group_size") is not None or fields.get("activation_bits"):
            problem = "trellis codes have no groups and no 8-bit inputs"
            raise SchemeError(problem, "Leave group_size and activation_bits out")
        return cls(float(fields["bits"]), str(fields[cls.key]))

    def found(self, module: str, headers: Headers) -> Exl3:
        """The width and the codebook of stored tensors. Raises CheckpointError for codes without whole or half bits."""
        tiles = headers.shape(f"{module}.trellis")
        pair_bits, rest = divmod(tiles[-1], PAIR_WORDS) if len(tiles) == 3 else (0, 1)
        if rest:
            raise CheckpointError(f"{module}.trellis {tiles} has no whole number of bits for two of its codes")
        codebooks = [name for name in MULTIPLIERS if f"{module}.{name}" in headers]
        return Exl3(pair_bits / 2, (*codebooks, DEFAULT_CODEBOOK)[0])

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        return len(_scales(stored, ".sv")), len(_scales(stored, ".su"))

    def read(self, stored: StoredTensors) -> Exl3Weight:
        """Reads a weight; scales that are signs alone (`su`, `sv`) become 1 and -1.

        Raises:
            CheckpointError: a codebook with another multiplier than the published one.
        """
        for name, multiplier in MULTIPLIERS.items():
            found = stored.optional(f".{name}")
            if found is not None and found.numel() == 1 and int(found) & 0xFFFFFFFF != multiplier:
                raise CheckpointError(f"{stored.module}.{name} is {int(found) & 0xFFFFFFFF:#x}, not {multiplier:#x}")
        return Exl3Weight(stored[".trellis"], _scales(stored, ".su"), _scales(stored, ".sv"), self)


@dataclass(frozen=True, slots=True)
class Exl3Weight(Weight):
    """`W [O, I]` as stored.

    Attributes:
        trellis: int16 `[padded(I) / 16, padded(O) / 16, 8 * pair_bits]`, one tile after the other.
        suh: float16 `[I]`.
        svh: float16 `[O]`.

    Raises:
        SchemeError: shapes that contradict each other or the scheme.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    scheme: Exl3

    def __post_init__(self) -> None:
        rows, columns, words = _tiles(self.trellis)
        if words != self.scheme.pair_bits * PAIR_WORDS:
            raise SchemeError(f"{words} words for each tile do not hold {self.scheme}")
        found = tuple(self.suh.shape), tuple(self.svh.shape)
        if [tuple(map(padded, sizes)) for sizes in found] != [(rows * TILE,), (columns * TILE,)]:
            raise SchemeError(f"scales {found} do not fit tiles {rows} x {columns}")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.svh), len(self.suh)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`; sums are exact in float64, so their order does not matter."""
        import torch

        from compress.checkpoint.kv_quant import hadamard_transform

        values = torch.empty(self.shape, dtype=dtype or torch.float32, device=self.trellis.device)
        turn = hadamard_transform(torch.eye(TURN, dtype=torch.float64)).to(self.suh.device)
        inputs = self.suh.double() / TURN
        for first, outputs in zip(range(0, self.shape[0], TURN), self.svh.double().split(TURN), strict=True):
            tiles = decode_tiles(self.trellis[:, first // TILE : (first + TURN) // TILE], self.scheme).double()
            turned = (turn @ tiles.unflatten(0, (-1, TURN)) @ turn).flatten(0, 1).t()[: len(outputs), : len(inputs)]
            values[first : first + TURN] = turned.mul_(inputs).mul_(outputs.unsqueeze(1))
        return values

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        stored = {".trellis": self.trellis, ".suh": self.suh, ".svh": self.svh}
        if self.scheme.codebook in MULTIPLIERS:
            multiplier = MULTIPLIERS[self.scheme.codebook]
            stored[f".{self.scheme.codebook}"] = torch.tensor(multiplier - 2**32, dtype=torch.int32)
        return {suffix: tensor.contiguous() for suffix, tensor in stored.items()}

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(f"{module}.suh", self.suh)
        yield from scale_problems(f"{module}.svh", self.svh)


def pair_widths(codebook: str) -> list[int]:
    """The bits that two codes of a codebook may have: even numbers, and those of half bits."""
    most_odd = 2 * MAX_HALVES if codebook == HALVES_CODEBOOK else 0
    return [bits for bits in range(2, 2 * MAX_BITS + 1) if bits % 2 == 0 or bits <= most_odd]


def padded(size: int) -> int:
    """The next multiple of the order of the Hadamard matrices, which the codes of a side of `size` fill."""
    return -(-size // TURN) * TURN


def decode_tiles(trellis: Tensor, scheme: Exl3) -> Tensor:
    """The values `[I, O]` of packed tiles, float16, before they are turned."""
    rows, columns, _ = trellis.shape
    values = codebook_values(scheme.codebook).to(trellis.device)[states(trellis, scheme.pair_bits)][..., tile_order()]
    return values.view(rows, columns, TILE, TILE).transpose(1, 2).reshape(rows * TILE, columns * TILE)


def states(trellis: Tensor, pair_bits: int) -> Tensor:
    """The 16 bits that end with each code, int32 `[..., 256]`; streams begin with the highest bit of 32-bit words."""
    import torch

    words = trellis.to(torch.int32) & 0xFFFF
    words = torch.unflatten(words, -1, (-1, 2)).flip(-1).flatten(-2)  # the higher half of each 32-bit word comes first
    first = (torch.arange(1, CODES + 1) * pair_bits // 2 - STATE_BITS) % (CODES // 2 * pair_bits)
    word, shift = (first // WORD_BITS).to(trellis.device), (WORD_BITS - first % WORD_BITS).to(trellis.device).int()
    pairs = words << WORD_BITS | words.roll(-1, -1)
    return pairs.index_select(-1, word) >> shift & 0xFFFF


@cache
def tile_order() -> Tensor:
    """Index in the stream of each value of a tile, by rows: the order in which threads of a warp hold an operand."""
    import torch

    thread, value = torch.arange(CODES) // 8, torch.arange(CODES) % 8
    row = thread % 4 * 2 + value % 2 + value // 2 % 2 * 8
    column = thread // 4 + value // 4 * 8
    return (row * TILE + column).argsort()


@cache
def codebook_values(codebook: str) -> Tensor:
    """The number of each state, float16 `[65536]`: sums of two halves, or of four bytes, of a hash."""
    import torch

    numbers = torch.arange(1 << STATE_BITS, dtype=torch.int64)
    if codebook == "mul1":
        hashed = numbers * MULTIPLIERS[codebook]
        total = sum(hashed >> 8 * byte & 0xFF for byte in range(4))
        scale, offset = torch.tensor([0x1EEE, 0xC931 - 2**16], dtype=torch.int16).view(torch.float16).float().unbind()
        return ((1024 + total) * scale + offset).half()  # exact in float32, so rounded once
    hashed = numbers * MULTIPLIERS[codebook] if codebook in MULTIPLIERS else numbers * 89226354 + 64248484
    mixed = (hashed & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (_halves(mixed >> shift & 0xFFFF) for shift in (0, 16))
    return (low + high).half()


def _halves(bits: Tensor) -> Tensor:
    """float16 numbers of their bits, as float32, in which the sum of two is exact here."""
    import torch

    return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).to(torch.int16).view(torch.float16).float()


def _tiles(trellis: Tensor) -> tuple[int, int, int]:
    """Rows, columns and words of the tiles. Raises CheckpointError for a tensor that holds none."""
    import torch

    if trellis.dim() != 3 or trellis.dtype != torch.int16:
        raise CheckpointError(f"trellis codes are int16 in 3 dimensions, not {trellis.dtype} {tuple(trellis.shape)}")
    rows, columns, words = trellis.shape
    return rows, columns, words


def _scales(stored: StoredTensors, signs: str) -> Tensor:
    """float16 scales, from bits of signs where those are stored instead."""
    import torch

    packed = stored.optional(signs)
    if packed is None:
        return stored[f"{signs}h"]
    if packed.dtype != torch.int16:
        raise CheckpointError(f"{stored.module}{signs} should hold bits in int16, not {packed.dtype}")
    bits = packed.to(torch.int32).unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32) & 1
    return (1 - 2 * bits.flatten()).half()
