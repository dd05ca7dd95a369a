"""The loop over keys, as it is compiled: a tile is read while the one before is computed, and what is multiplied goes
straight from its words to the product."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from covering import sample
from jit_without_gpu.attention_loop import loop_of_latents, loop_of_pages
from jit_without_gpu.own_process import compile_in_own_process

COPY = "async_copy_global_to_local"


def check(loop: list[str], in_flight: int) -> None:
    """Waits only for what an earlier round has asked for, and leaves the reads of a tile under way."""
    copies, waits = [i for i, name in enumerate(loop) if name == COPY], [n for n in loop if n.startswith("async_wait")]
    assert len(copies) >= in_flight
    assert all(int(each.split()[1]) >= in_flight for each in waits)
    assert max(i for i, name in enumerate(loop) if name in waits) < min(copies)


@pytest.mark.full
@pytest.mark.parametrize("arch", sample([90, 80]))
@pytest.mark.parametrize(("form", "tokens", "copies"), [("16bit", 1, 3), ("fp8", 1, 6), ("int8", 1, 6), ("int4", 1, 6)])
def test_decodes_read_a_tile_ahead_and_convert_no_layout(
    tmp_path: Path, form: str, tokens: int, copies: int, arch: int
) -> None:
    loop = compile_in_own_process(tmp_path, loop_of_pages, form, arch, tokens)
    check(loop, copies)
    assert sum(name.startswith("async_wait") for name in loop) == 1
    assert "convert_layout" not in loop
    assert "tt.load" not in loop, "numbers that are waited for at once"


@pytest.mark.full
@pytest.mark.parametrize("arch", sample([90, 80]))
@pytest.mark.parametrize("form", ["16bit", "int4"])
def test_prompts_read_a_tile_ahead(tmp_path: Path, form: str, arch: int) -> None:
    check(compile_in_own_process(tmp_path, loop_of_pages, form, arch, 512), 3)


@pytest.mark.full
@pytest.mark.parametrize("rows", sample([16, 32]))
@pytest.mark.parametrize("form", ["16bit", "fp8", "int8"])
def test_latents_are_read_a_tile_ahead(tmp_path: Path, form: str, rows: int) -> None:
    """Codes of 8 bits wait apart for a block table, with copies under way as well."""
    loop = compile_in_own_process(tmp_path, loop_of_latents, form, 90, rows)
    assert all(int(name.split()[1]) >= 1 for name in loop if name.startswith("async_wait"))
    if form == "16bit":
        check(loop, 4)
