"""Memory nodes: what the system says of them, and jobs that are shared out over them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.cpu.binding import library
from compress.cpu.build import SOURCES, compile_c, find_compiler
from compress.cpu.memory_nodes import memory_nodes, parse_processors, processor_masks

COMMON = SOURCES / "common"


@pytest.mark.parametrize(
    ("text", "processors"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("0-1,2-3,64", {0, 1, 2, 3, 64})]
)
def test_lists_of_processors(text: str, processors: set[int]) -> None:
    assert parse_processors(text) == processors


def test_nodes_are_those_that_this_process_may_run_on(tmp_path: Path) -> None:
    for name, processors in (("node0", "0-3"), ("node1", ""), ("node2", "4-7"), ("node10", "8-11"), ("node3", "12")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(processors + "\n")
    assert memory_nodes(tmp_path, range(64)) == [[0, 1, 2, 3], [4, 5, 6, 7], [12], [8, 9, 10, 11]]
    assert memory_nodes(tmp_path, [2, 3, 8]) == [[2, 3], [8]]
    assert memory_nodes(tmp_path / "absent", range(64)) == []


def test_masks_have_a_bit_for_each_processor() -> None:
    masks = list(processor_masks([[0, 65], [1023]]))
    assert masks == [1, 2] + [0] * 14 + [0] * 15 + [1 << 63]


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_threads_take_the_chunks_of_their_node_first(tmp_path: Path) -> None:
    program = tmp_path / "driver"
    sources = [str(Path(__file__).with_name("memory_nodes_driver.c")), *map(str, sorted(COMMON.glob("*.c")))]
    compile_c([f"-I{SOURCES}", "-O1", *sources, "-o", str(program)])
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(library() is None or not hasattr(os, "sched_getaffinity"), reason="no library, or no affinity")
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_products_do_not_depend_on_nodes(num_nodes: int) -> None:
    """Every node is given all processors of this process; large weights are touched part by part."""
    code = f"""
import os, torch
from compress.cpu.binding import library, set_threads
from compress.cpu.memory_nodes import processor_masks
from runtime.backends.cpu.linear import CpuLinear
weight, x = torch.randn(4096, 2048).bfloat16(), torch.randn(3, 2048).bfloat16()
set_threads(1)
expected = CpuLinear(weight)(x)
assert library().nodes_set({num_nodes}, processor_masks([os.sched_getaffinity(0)] * {num_nodes})) == {num_nodes}
set_threads(4)
spread = CpuLinear(weight)
assert all(torch.equal(spread(x), expected) for _ in range(20))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parents[2])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
