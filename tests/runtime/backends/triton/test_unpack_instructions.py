"""The PTX that unpacks codes, which the interpreter cannot run, computed one instruction after the other."""

import operator
import re

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights.exl3 import CODEBOOKS, codebook_values
from compress.checkpoint.weights.forms import E2M1_VALUES, IQ4_NL_VALUES, NF4_VALUES

WHOLE_WORDS = {"shr": operator.rshift, "shl": operator.lshift, "and": operator.and_, "or": operator.or_}
HALVES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def halves(word: int, kind: str) -> Tensor:
    """Returns the two floats of a word, exactly."""
    low, high = ((half ^ 0x8000) - 0x8000 for half in (word & 0xFFFF, word >> 16))
    return torch.tensor([low, high], dtype=torch.int16).view(HALVES[kind]).double()


def joined(numbers: Tensor, kind: str) -> int:
    low, high = (half & 0xFFFF for half in numbers.to(HALVES[kind]).view(torch.int16).tolist())
    return high << 16 | low


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Each bit of the result is the bit of the table that the bits of a, b and c number."""
    terms = [(a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) for row in range(8)]
    return sum(term & 0xFFFFFFFF for row, term in enumerate(terms) if table >> row & 1) & 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Each byte of the result is one of b and a, or the sign of one in all bits."""
    places = [selector >> 4 * place & 15 for place in range(4)]
    taken = [(b << 32 | a) >> 8 * (place & 7) & 0xFF for place in places]
    bytes_ = [0xFF * (byte >> 7) if place & 8 else byte for place, byte in zip(places, taken, strict=True)]
    return int.from_bytes(bytes(bytes_), "little")


def run(text: str, given: dict[str, int]) -> dict[str, int]:
    """Runs PTX on registers and returns all of them."""
    registers = dict(given)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for name, operands in re.findall(r"(lop3|prmt|shr|shl|and|or|mov|add|fma)\.([^;]*);", text):
        kind, rest = operands.split(" ", 1)
        target, *operands = (part.strip() for part in rest.split(","))
        numbers = [value(part) for part in operands]
        if name == "lop3":
            registers[target] = lop3(*numbers)
        elif name == "prmt":
            registers[target] = prmt(*numbers)
        elif name in WHOLE_WORDS:
            registers[target] = WHOLE_WORDS[name](*numbers) & 0xFFFFFFFF
        elif name == "mov":
            registers[target] = numbers[0]
        else:
            kind = kind.split(".")[-1]
            first, *others = (halves(number, kind) for number in numbers)
            registers[target] = joined(first + others[0] if name == "add" else first * others[0] + others[1], kind)
    return registers


@pytest.mark.parametrize("is_bfloat16", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_code_comes_out_as_offset_and_code(bits: int, is_bfloat16: bool) -> None:
    from runtime.backends.triton.kernels.common import unpack_instructions

    offset = -128 if bits == 8 else 128 if is_bfloat16 else 1024
    noise = 0x5AA59669
    for plane, text in enumerate(unpack_instructions(bits, is_bfloat16)):
        shift = plane * bits
        for code in range(1 << bits):
            other = (1 << bits) - 1 - code
            stored = [each ^ 128 if bits == 8 else each for each in (code, other)]
            field = ((1 << bits) - 1) << shift
            word = noise & ~(field << 16 | field) | stored[1] << shift + 16 | stored[0] << shift
            found = halves(run(text, {"$1": word})["$0"], "bf16x2" if is_bfloat16 else "f16x2")
            assert found.tolist() == [offset + code, offset + other]


@pytest.mark.parametrize("is_bfloat16", [True, False])
def test_every_8_bit_float_comes_out_exactly(is_bfloat16: bool) -> None:
    from runtime.backends.triton.kernels.common import float8_instructions

    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = [byte for byte in range(256) if not numbers[byte].isnan()]
    for plane, text in enumerate(float8_instructions(is_bfloat16)):
        for byte, other in zip(finite, reversed(finite), strict=True):
            stored = [each << 8 * plane | (0x5A << 8 * (1 - plane)) for each in (byte, other)]
            found = halves(run(text, {"$1": stored[1] << 16 | stored[0]})["$0"], "bf16x2" if is_bfloat16 else "f16x2")
            expected = numbers[[byte, other]]
            assert torch.equal(found, expected)
            assert torch.equal(found.signbit(), expected.signbit())


def test_every_state_of_a_trellis_comes_out_as_its_number() -> None:
    from runtime.backends.triton.kernels.trellis import HALVES_ADDED

    for codebook, (factor, added) in zip(CODEBOOKS, ((89226354, 64248484), (0xCBAC1FED, 0)), strict=False):
        expected = codebook_values(codebook).double()
        for state in range(0, 2**16, 13):
            found = halves(run(HALVES_ADDED, {"$1": (state * factor + added) & 0xFFFFFFFF})["$0"], "f16x2")
            assert found.tolist() == [expected[state]] * 2


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("values", [E2M1_VALUES, NF4_VALUES, IQ4_NL_VALUES], ids=["e2m1", "nf4", "iq4_nl"])
def test_every_code_is_looked_up_in_every_place(values: tuple[float, ...], kind: str) -> None:
    from runtime.backends.triton.kernels.fp4 import look_up_instructions

    expected = torch.tensor(values).to(HALVES[kind]).view(torch.int16)
    for half, text in enumerate(look_up_instructions(values, HALVES[kind])):
        for code in range(256):
            stored = [code, 255 - code, code ^ 0x5A, (code * 7 + 3) & 255]
            registers = run(text, {"$2": int.from_bytes(bytes(stored), "little")})
            found = torch.tensor([registers["$0"], registers["$1"]]).view(torch.int16).view(2, 4)[:, :2].flatten()
            assert torch.equal(found, expected[[byte >> 4 * half & 15 for byte in stored]])
