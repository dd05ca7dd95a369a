"""The C linears and their thread pool under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from compress.checkpoint.errors import ToolkitError
from compress.native.build import SOURCES, compile_c, find_compiler

DRIVER = Path(__file__).with_name("linear_driver.c")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_no_memory_or_arithmetic_error(tmp_path: Path) -> None:
    if not _has_sanitizers(tmp_path):
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "driver"
    sources = [*SOURCES.glob("linear*.c"), SOURCES / "pool.c", SOURCES / "dispatch.c", DRIVER]
    compile_c([*SANITIZED, f"-I{SOURCES}", *(str(source) for source in sources), "-o", str(program)])
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def _has_sanitizers(folder: Path) -> bool:
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        compile_c([*SANITIZED, str(empty), "-o", str(folder / "empty")])
    except ToolkitError:
        return False
    return True
