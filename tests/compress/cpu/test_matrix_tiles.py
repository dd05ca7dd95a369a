"""Products by matrix tiles (AMX): emulated ones against vectors bit by bit, and the instructions in the library."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, absence, best_instruction_set, library, tiles_refusal
from compress.cpu.build import LIBRARY, SOURCES, compile_c, find_compiler
from runtime.backends.cpu.linear import Activations, CpuLinear

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
ON_X86 = platform.machine() in ("x86_64", "AMD64")
HAS_VECTORS = ON_X86 and best_instruction_set() >= INSTRUCTION_SETS.index("avx512")
TILES = [EMULATED, *([best_instruction_set()] if INSTRUCTION_SETS[best_instruction_set()] == "amx" else [])]
every_tile = pytest.mark.parametrize("tiles", TILES, ids=lambda index: INSTRUCTION_SETS[index])
GROUPS = [32, 96, 128, None]
INPUTS = 1152


def cancelling(bits: int, group: int | None = None, outputs: int = 96) -> tuple[CodedWeight | Tensor, Tensor]:
    """A weight `[outputs, INPUTS]` and 40 rows with products of zero: a result is what rounding leaves of it."""
    random = torch.Generator().manual_seed(bits)
    order = torch.randperm(INPUTS // 2, generator=random)
    half = torch.randn(40, INPUTS // 2, generator=random)
    x = torch.cat((half, half[:, order]), 1).bfloat16()
    if bits == 16:
        numbers = torch.randn(outputs, INPUTS // 2, generator=random)
        return torch.cat((numbers, -numbers[:, order]), 1).bfloat16(), x
    scheme = Int(bits, group)
    codes = torch.randint(1, 1 << bits, (outputs, INPUTS // 2), generator=random)
    codes = torch.cat((codes, 2 * scheme.zero - codes[:, order]), 1).to(torch.uint8)
    groups = INPUTS // (group or INPUTS)
    scales = (torch.rand(outputs, 1, generator=random) + 0.5).expand(outputs, groups).contiguous()
    return scheme.weight(codes, scales, torch.full((outputs, groups), scheme.zero, dtype=torch.uint8)), x


@every_tile
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("group", GROUPS)
def test_rows_alone_have_the_bits_of_tiles(bits: int, group: int | None, tiles: int) -> None:
    """Up to three rows may be multiplied by vectors (AVX-512), in the order of a tile's sums."""
    weight, x = cancelling(bits, group)
    linear = CpuLinear(weight, fewest_tile_rows=4, instruction_set=tiles)
    whole = linear(x)
    assert torch.equal(CpuLinear(weight, fewest_tile_rows=1, instruction_set=tiles)(x[:2]), whole[:2])
    assert whole.count_nonzero() > whole.numel() / 2
    for rows in (1, 2, 3, 4, 5, 16, 17, 18, 31, 33, 40):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


@pytest.mark.skipif(not HAS_VECTORS, reason="no AVX-512")
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_another_order_of_sums_has_other_bits(bits: int) -> None:
    weight, x = cancelling(bits)
    by_tiles, by_vectors = (CpuLinear(weight, instruction_set=index)(x) for index in (EMULATED, best_instruction_set()))
    assert not torch.equal(by_tiles, by_vectors)


@pytest.mark.skipif(not HAS_VECTORS, reason="no AVX-512")
@every_tile
@pytest.mark.parametrize("kind", [Activations.INT8_GROUP, Activations.INT8_ROW, Activations.INT4_ROW])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", GROUPS)
def test_8_bit_products_have_the_bits_of_vectors(bits: int, group: int | None, kind: Activations, tiles: int) -> None:
    weight, x = cancelling(bits, group)
    vectors = CpuLinear(weight, activations=kind, instruction_set=INSTRUCTION_SETS.index("avx512"))
    linear = CpuLinear(weight, activations=kind, fewest_tile_rows=1, instruction_set=tiles)
    for rows in (1, 3, 4, 21, 40):
        assert torch.equal(linear(x[:rows]), vectors(x[:rows]))


def test_what_speaks_against_tiles_is_said() -> None:
    assert bool(tiles_refusal()) == (INSTRUCTION_SETS[best_instruction_set()] != "amx")
    assert not tiles_refusal() or "AMX" in tiles_refusal()


@pytest.mark.skipif(not ON_X86, reason="no x86")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_library_has_the_instructions() -> None:
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", LIBRARY], capture_output=True, text=True, check=True
    )
    found = set(re.findall(r"^ *[0-9a-f]+:\t(ldtilecfg|tile\w+|tdp\w+)", listing.stdout, re.MULTILINE))
    assert found == {"ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tdpbf16ps", "tdpbsud"}


@pytest.mark.full
@pytest.mark.skipif(INSTRUCTION_SETS[best_instruction_set()] not in ("avx512_bf16", "amx"), reason="no AVX-512 BF16")
@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_the_machine_code_has_the_bits_of_the_emulation(tmp_path: Path) -> None:
    """A processor without tiles raises a signal at each of their instructions, and the driver does what they say."""
    program, common = tmp_path / "driver", sorted((SOURCES / "common").glob("*.c"))
    sources = [file for file in (*common, *sorted(SOURCES.glob("linear/*.c"))) if file.name != "dispatch.c"]
    driver = [Path(__file__).with_name("amx_driver.c"), *sources]
    compile_c([*map(str, driver), "-o", str(program)])
    result = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (int(result.stdout) > 10_000) == bool(tiles_refusal())
