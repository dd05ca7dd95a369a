"""The C kernels and their thread pool under the address and undefined-behaviour sanitizers, and as ARM runs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from compress.common.errors import ToolkitError
from compress.cpu.binding import ARM_SETS
from compress.cpu.build import FLAGS, SOURCES, compile_c, find_compiler

DRIVERS = {
    "tiles_driver.c": (),
    "linear_driver.c": ("linear/*.c",),
    "mixture_driver.c": ("linear/*.c", "layers/mixture.c", "layers/norm_rope_act.c"),
    "state_driver.c": ("state/*.c",),
    "rounding_driver.c": ("rounding/*.c",),
    "attention_driver.c": ("attention/*.c", "kv/*.c", "layers/norm_rope_act.c", "gptq/*.c"),
    "sampling_driver.c": ("sampling/*.c",),
    "trellis_driver.c": ("trellis/*.c",),
}
"""Drivers and the sources that each tests, in addition to the pool and the dispatch that all need."""
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
needs_arm = pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason=f"needs {ARM_COMPILER} and {ARM_EMULATOR}: apt install gcc-aarch64-linux-gnu qemu-user",
)
PRINT_BEST_SET = """
#include <stdio.h>
#include "common/dispatch.h"
int main(void) { printf("%d", native_best_instruction_set()); }
"""
SANITIZED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.full
@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_memory_or_arithmetic_error(driver: str, tmp_path: Path) -> None:
    if not _has_sanitizers(tmp_path):
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "driver"
    compile_c([*SANITIZED, *_sources(driver), "-o", str(program)])
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.full
@needs_arm
@pytest.mark.parametrize("driver", DRIVERS)
def test_arm(driver: str, tmp_path: Path) -> None:
    """Compiled without warnings for a processor that is not x86, and right there with every instruction set."""
    result = _emulated("max", _compiled_for_arm([*_sources(driver), "-static"], tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.full
@needs_arm
@pytest.mark.parametrize(
    ("processor", "best"), [("cortex-a57", "neon"), ("neoverse-n1", "neon_dotprod"), ("max", "neon_i8mm")]
)
def test_arm_processors_get_their_best_set(processor: str, best: str, tmp_path: Path) -> None:
    main = tmp_path / "main.c"
    main.write_text(PRINT_BEST_SET)
    sources = f"-I{SOURCES}", str(main), str(SOURCES / "common" / "dispatch.c")
    result = _emulated(processor, _compiled_for_arm([*sources, "-static"], tmp_path))
    assert ARM_SETS[int(result.stdout)] == best


@pytest.mark.full
@needs_arm
def test_the_whole_library_compiles_for_arm(tmp_path: Path) -> None:
    _compiled_for_arm(["-shared", f"-I{SOURCES}", *map(str, sorted(SOURCES.rglob("*.c")))], tmp_path)


def _compiled_for_arm(arguments: list[str], folder: Path) -> Path:
    program = folder / "program"
    command = [ARM_COMPILER, *FLAGS, "-O1", "-Werror", *arguments, "-o", str(program), "-lm"]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    return program


def _emulated(processor: str, program: Path) -> subprocess.CompletedProcess[str]:
    command = [ARM_EMULATOR, "-cpu", processor, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def _sources(driver: str) -> list[str]:
    common = SOURCES / "common"
    sources = [Path(__file__).with_name(driver), *sorted(common.glob("*.c"))]
    sources += [file for pattern in DRIVERS[driver] for file in sorted(SOURCES.glob(pattern))]
    return [f"-I{SOURCES}", *(str(source) for source in sources)]


def _has_sanitizers(folder: Path) -> bool:
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        compile_c([*SANITIZED, str(empty), "-o", str(folder / "empty")])
    except ToolkitError:
        return False
    return True
