"""The C kernels and their thread pool under the address and undefined-behaviour sanitizers, and as ARM runs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from compress.common.errors import ToolkitError
from compress.cpu.build import FLAGS, SOURCES, compile_c, find_compiler

DRIVERS = {
    "linear_driver.c": ("linear/*.c",),
    "mixture_driver.c": ("linear/*.c", "layers/mixture.c", "layers/norm_rope_act.c"),
    "state_driver.c": ("state/*.c",),
    "attention_driver.c": ("attention/*.c", "kv/*.c", "layers/norm_rope_act.c", "gptq/*.c", "sampling/*.c"),
}
"""Drivers and the sources that each tests, beside the pool and the dispatch that all need."""
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
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


@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"no {ARM_COMPILER}")
@pytest.mark.skipif(shutil.which(ARM_EMULATOR) is None, reason=f"no {ARM_EMULATOR}")
@pytest.mark.parametrize("driver", DRIVERS)
def test_arm(driver: str, tmp_path: Path) -> None:
    """Compiled without warnings for a processor that is not x86, and right there with every instruction set."""
    program = tmp_path / "driver"
    command = [ARM_COMPILER, *FLAGS, "-O1", "-Werror", "-static", *_sources(driver), "-o", str(program), "-lm"]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    result = subprocess.run([ARM_EMULATOR, program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def _sources(driver: str) -> list[str]:
    common = SOURCES / "common"
    sources = [Path(__file__).with_name(driver), common / "thread_pool.c", common / "dispatch.c"]
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
