"""Counts of machine code: loops, copies and programs at once of a listing, and of a kernel that is really compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytest.importorskip("triton")

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR6][R2.64] ;
.L_x_0:
        /*0020*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
        /*0040*/              @!P1 BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   DEPBAR.LE SB0, 0x4 ;
        /*0060*/                   LDSM.16.M88.4 R4, [R8] ;
        /*0070*/         @!UP0     LDG.E.U16 R9, desc[UR6][R2.64] ;
        /*0080*/                   HMMA.16816.F32.BF16 R4, R4, R8, R12 ;
        /*0090*/               @P2 LDGSTS.E.BYPASS.128 [R4], desc[UR6][R2.64] ;
        /*00a0*/                   LDGDEPBAR ;
        /*00b0*/                   LDGSTS.E [R4], desc[UR6][R2.64] ;
        /*00c0*/                   LDGDEPBAR ;
        /*00d0*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*00e0*/                   EXIT ;
"""


def test_the_main_loop_is_the_one_with_products() -> None:
    from benchmarking.gpu.sass import main_loop

    loop = main_loop(LISTING)
    assert [each.kind for each in loop.body][0::8] == ["DEPBAR", "BRA"]
    assert (len(loop.body), loop.count("LDG"), loop.count("LDGSTS")) == (9, 1, 2)
    assert loop.copies_ahead == 3


def test_a_kernel_without_products_is_counted_whole() -> None:
    from benchmarking.gpu.sass import main_loop

    assert len(main_loop(LISTING.replace("HMMA", "FFMA")).body) == 15


def test_figures_of_a_loop() -> None:
    from benchmarking.gpu.sass import Resources, Tile, figures, main_loop

    takes = Resources(registers=56, shared_bytes=28 * 1024, stack_bytes=0, num_warps=4)
    found = figures(main_loop(LISTING), Tile((16, 32), 4, 8), takes)
    assert found.slots_per_element == 9 * 128 / 512
    assert takes.programs == 7
    assert found.bytes_in_flight == 3 * 256 * 7


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "programs"),
    [(56, 28 * 1024, 4, 7), (255, 0, 8, 1), (84, 0, 8, 2), (32, 0, 4, 16), (16, 0, 1, 32), (32, 227 * 1024, 4, 1)],
)
def test_programs_at_once(registers: int, shared_bytes: int, num_warps: int, programs: int) -> None:
    from benchmarking.gpu.sass import programs_at_once

    assert programs_at_once(registers, shared_bytes, num_warps) == programs


@pytest.mark.full
def test_a_compiled_kernel_is_counted(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "code.json"
    options = ["gpu-code", "--only", "int4 4096x4096, M=16", "--json", str(out)]
    command = [sys.executable, str(SCRIPTS / "bench_kernels.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = json.loads(out.read_text())["launches"].values()
    assert found["kernel"] == "w4a16_skinny_gemm"
    assert found["stack_bytes"] == 0
    assert found["copies"] > 0
    assert 1 < found["slots_per_element"] < 5
    assert found["bytes_in_flight"] > 32 * 1024
