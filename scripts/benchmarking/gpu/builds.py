"""Checks of the machine code of Triton kernels."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarking.gpu.without_gpu import Build
from benchmarking.tables import Row

TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA")
SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may have, by architecture."""
SPILL_LIMIT = {80: 16, 90: 32}
"""Bytes of stack that pass, by architecture: norms of sums in 16 splits have as many on an A100, 4-bit weights in
groups of 32 for 64 tokens on an H100."""
ATTENTION_SPILL_LIMIT = {80: 24, 90: 56}
"""The same for attention: what its worst builds have until they are tuned on a GPU."""
CONVERSIONS = ("I2F", "I2FP")
MAX_CONVERSIONS = 16
"""Some are made once for each scale and index; a code that is converted by itself costs at least 32 of them a tile."""


def _always(_: Build) -> bool:
    return True


def _never(_: Build) -> bool:
    return False


def _whole_vocabulary(build: Build) -> bool:
    return "V" in build.aligned


def _long_sums(build: Build) -> bool:
    return dict(build.types)["part_ptr"] in ("*fp32", "*i32") and dict(build.constants)["HEAD_DIM"] > 64


@dataclass(frozen=True)
class Rules:
    """Requirements on the machine code of one kernel.

    Attributes:
        wants: instructions of which one must be present; none if empty.
        wants_on: the same for single architectures, instead of `wants`.
        converts: codes may be converted one by one, as those of 8 bits are.
        wide: whether some load of a build must take 16 bytes at once.
    """

    wants: tuple[str, ...] = ()
    wants_on: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    converts: bool = False
    wide: Callable[[Build], bool] = _never


RULES = {
    "w4a16_skinny_gemm": Rules(TENSOR_CORES),
    "w4a16_gemm": Rules(TENSOR_CORES),
    "expand": Rules(),
    "expand_fp8": Rules(),
    "expand_fp4": Rules(),
    "expand_trellis": Rules(converts=True),
    "turn_inputs": Rules(converts=True),
    "turn_sums": Rules(converts=True),
    "grouped_w4a16_gemm": Rules(TENSOR_CORES),
    "int8_gemm": Rules(("IMMA", "IGMMA")),
    "fp8_skinny_gemm": Rules(TENSOR_CORES),
    "fp4_skinny_gemm": Rules(TENSOR_CORES),
    "fp8_gemm": Rules(("QMMA",), {90: ("QGMMA",)}),
    "paged_attention": Rules(TENSOR_CORES, converts=True),
    "latent_attention": Rules(TENSOR_CORES, converts=True),
    "list_tiles": Rules(converts=True),
    "join_splits": Rules(),
    "causal_conv": Rules(converts=True),
    "state_step": Rules(converts=True),
    "chunk_products": Rules(TENSOR_CORES, converts=True),
    "state_scan": Rules(TENSOR_CORES, converts=True),
    "gated_norm": Rules(converts=True),
    "fused_qk_norm_rope_kv_write": Rules(converts=True, wide=_long_sums),
    "convert_input_kernel": Rules(wide=_always),
    "split_k_reduce_kernel": Rules(converts=True, wide=_always),
    "add_rms_norm_kernel": Rules(converts=True, wide=_always),
    "silu_and_mul_kernel": Rules(converts=True, wide=_always),
    "change_columns": Rules(converts=True),
    "search_stream": Rules(converts=True),
    "sample_parts": Rules(converts=True, wide=_whole_vocabulary),
    "join_parts": Rules(converts=True),
    "sample_listed_kernel": Rules(converts=True),
}
"""By kernel; one that is missing here fails."""


@dataclass(frozen=True)
class Built:
    """Resources and findings of one build. Instructions are counted by their first word over the whole kernel."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        return self.name.split(" ")[0]

    def __str__(self) -> str:
        state = "; ".join(self.problems) if self.problems else "ok"
        return f"sm_{self.arch} {self.name}: {self.registers} registers, {self.shared_bytes} B shared, {state}"


def name_of(build: Build) -> str:
    """Names a build by its kernel and the constants that people can read."""
    words = (_word(name, value) for name, value in build.constants if _is_short(value))
    types = (kind for name, kind in build.types[:1])
    return " ".join((build.kernel, *types, *words, f"{build.num_warps}w"))


def _word(name: str, value: Any) -> str:
    return name if value is True else f"{name.removesuffix('_ptr')}={value}"


def _is_short(value: Any) -> bool:
    return value not in (False, None, "") and len(str(value)) < 20


def inspect(build: Build) -> Built:
    """Reads the machine code of a build and checks it."""
    usage, code = (
        _tool(*command, build.cubin) for command in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
    )
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = Counter(match[1] for match in re.finditer(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code))
    has_wide_load = re.search(r"\bLDG\S*\.128", code) is not None
    problems = tuple(find_problems(build, stack, counts, has_wide_load))
    return Built(name_of(build), build.arch, registers, stack, build.shared_bytes, dict(counts), problems)


def find_problems(build: Build, stack: int, counts: Counter[str], has_wide_load: bool) -> Iterator[str]:
    """Violated requirements, each as a sentence with its number."""
    rules = RULES.get(build.kernel)
    if rules is None:
        yield f"{build.kernel} has no rules in benchmarking/gpu/builds.py"
        return
    limits = ATTENTION_SPILL_LIMIT if build.kernel == "paged_attention" else SPILL_LIMIT
    if stack > limits.get(build.arch, 0):
        yield f"spills: {stack} bytes of stack, {counts['LDL']} loads, {counts['STL']} stores"
    if build.shared_bytes > SHARED_MEMORY_LIMIT[build.arch]:
        yield f"{build.shared_bytes} bytes of shared memory, {SHARED_MEMORY_LIMIT[build.arch]} are there"
    wants = rules.wants_on.get(build.arch, rules.wants)
    if wants and not any(counts[each] for each in wants):
        yield f"none of {', '.join(wants)}"
    conversions = sum(counts[each] for each in CONVERSIONS)
    if conversions > MAX_CONVERSIONS and not rules.converts:
        yield f"{conversions} conversions of integers"
    if rules.wide(build) and not has_wide_load:
        yield "no load of 16 bytes"


def _tool(name: str, option: str, cubin: Path) -> str:
    """Output of a tool that comes with Triton."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([path, option, cubin], capture_output=True, text=True, check=True).stdout


def worst_of_each_kernel(results: Sequence[Built]) -> list[Row]:
    """A row for each kernel and architecture: builds, failures, and the most that one build takes."""
    groups: dict[tuple[str, int], list[Built]] = {}
    for result in sorted(results, key=lambda result: (result.kernel, result.arch)):
        groups.setdefault((result.kernel, result.arch), []).append(result)
    return [
        {
            "kernel": kernel,
            "for": f"sm_{arch}",
            "builds": str(len(group)),
            "failed": str(sum(bool(result.problems) for result in group)),
            "registers": str(max(result.registers for result in group)),
            "shared memory, KiB": f"{max(result.shared_bytes for result in group) / 1024:.0f}",
            "stack, bytes": str(max(result.stack_bytes for result in group)),
        }
        for (kernel, arch), group in groups.items()
    ]
