"""Ahead-of-time builds of recorded kernel launches, and checks of their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarking.launches import Choice, Launch, by_kernel, cover, varying_choices
from benchmarking.tables import Row

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may have, by architecture."""
SPILL_LIMIT = {80: 16}
"""Bytes of stack that pass, by architecture: norms of sums in 16 splits have as many on an A100."""
ATTENTION_SPILL_LIMIT = {80: 24, 90: 56}
"""The same for attention: what its worst builds have until they are tuned on a GPU."""
TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "IGMMA")
CONVERSIONS = ("I2F", "I2FP")
MAX_CONVERSIONS = 16
"""Some are made once for each scale and index; a code that is converted by itself costs at least 32 of them a tile."""
MANY = 150
"""A kernel with more launches than this is built for every `AT_ONCE` choices together instead of every launch."""
AT_ONCE = 3


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _never(_: Mapping[str, Any]) -> bool:
    return False


def _whole_vocabulary(choices: Mapping[str, Any]) -> bool:
    return choices["V%16"]


def _long_sums(choices: Mapping[str, Any]) -> bool:
    return choices["part_ptr"] in ("*fp32", "*i32") and choices["HEAD_DIM"] > 64


@dataclass(frozen=True)
class Rules:
    """Requirements on the machine code of one kernel.

    Attributes:
        wants: instructions of which one must be present; none if empty.
        wants_on: the same for single architectures, instead of `wants`.
        converts: codes may be converted one by one, as those of 8 bits are.
        wide: whether some load must take 16 bytes at once, from the choices of a launch.
    """

    wants: tuple[str, ...] = ()
    wants_on: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    converts: bool = False
    wide: Callable[[Mapping[str, Any]], bool] = _never


RULES = {
    "w4a16_skinny_gemm": Rules(TENSOR_CORES),
    "w4a16_gemm": Rules(TENSOR_CORES),
    "expand": Rules(),
    "grouped_w4a16_gemm": Rules(TENSOR_CORES),
    "w8a16_gemm": Rules(TENSOR_CORES, converts=True),
    "int8_gemm": Rules(("IMMA", "IGMMA")),
    "fp8_skinny_gemm": Rules(TENSOR_CORES),
    "fp8_gemm": Rules(("QMMA",), {90: ("QGMMA",)}),
    "paged_attention": Rules(TENSOR_CORES, converts=True),
    "latent_attention": Rules(TENSOR_CORES, converts=True),
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
    "sample_parts": Rules(converts=True, wide=_whole_vocabulary),
    "join_parts": Rules(converts=True),
    "sample_listed_kernel": Rules(converts=True),
}
"""By kernel; one that is missing here fails."""


@dataclass(frozen=True)
class Build:
    """A launch to be compiled for one architecture; the name tells it from others of its kernel."""

    arch: int
    name: str
    launch: Launch


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

    def __str__(self) -> str:
        state = "; ".join(self.problems) if self.problems else "ok"
        return f"sm_{self.arch} {self.name}: {self.registers} registers, {self.shared_bytes} B shared, {state}"


def all_builds(arch: int, every: bool = False) -> list[Build]:
    """A build of every launch, or of every `AT_ONCE` choices together where a kernel has over `MANY` launches.

    Args:
        every: all launches of all kernels.
    """
    from benchmarking.kernel_calls import all_launches

    builds = []
    for kernel, launches in by_kernel(all_launches(arch)).items():
        chosen = launches if every or len(launches) <= MANY else cover(launches, AT_ONCE)
        names = (_named(kernel, choices) for choices in varying_choices(chosen))
        builds += [Build(arch, name, launch) for name, launch in zip(names, chosen, strict=True)]
    return builds


def _named(kernel: str, choices: Sequence[Choice]) -> str:
    return " ".join((kernel, *(_word(name, value) for name, value in choices if _is_short(name, value))))


def _word(name: str, value: Any) -> str:
    return name if name.endswith("%16") else f"{name.removesuffix('_ptr')}={value}"


def _is_short(name: str, value: Any) -> bool:
    return value is not False if name.endswith("%16") else len(str(value)) < 20


def build(wanted: Build) -> Built:
    """Compiles and checks one launch; an error of the compiler is a problem like any other."""
    try:
        compiled = _compile(wanted)
    except Exception as error:  # whatever the compiler raises is the finding
        return Built(wanted.name, wanted.arch, 0, 0, 0, {}, (f"does not compile: {str(error)[-500:]}",))
    return inspect(wanted, compiled.asm["cubin"], compiled.metadata.shared)


def inspect(wanted: Build, cubin: bytes, shared_bytes: int) -> Built:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = Counter(match[1] for match in re.finditer(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code))
    has_wide_load = re.search(r"\bLDG\S*\.128", code) is not None
    problems = tuple(find_problems(wanted, stack, shared_bytes, counts, has_wide_load))
    return Built(wanted.name, wanted.arch, registers, stack, shared_bytes, dict(counts), problems)


def find_problems(
    wanted: Build, stack: int, shared_bytes: int, counts: Counter[str], has_wide_load: bool
) -> Iterator[str]:
    """Violated requirements, each as a sentence with its number."""
    launch, rules = wanted.launch, RULES.get(wanted.launch.kernel)
    if rules is None:
        yield f"{launch.kernel} has no rules in benchmarking/builds.py"
        return
    limits = ATTENTION_SPILL_LIMIT if launch.kernel == "paged_attention" else SPILL_LIMIT
    if stack > limits.get(wanted.arch, 0) and not launch.tried:
        yield f"spills: {stack} bytes of stack, {counts['LDL']} loads, {counts['STL']} stores"
    if shared_bytes > SHARED_MEMORY_LIMIT[wanted.arch] and not launch.tried:
        yield f"{shared_bytes} bytes of shared memory, {SHARED_MEMORY_LIMIT[wanted.arch]} are there"
    wants = rules.wants_on.get(wanted.arch, rules.wants)
    if wants and not any(counts[each] for each in wants):
        yield f"none of {', '.join(wants)}"
    conversions = sum(counts[each] for each in CONVERSIONS)
    if conversions > MAX_CONVERSIONS and not rules.converts:
        yield f"{conversions} conversions of integers"
    if rules.wide(dict(launch.choices)) and not has_wide_load:
        yield "no load of 16 bytes"


def _compile(wanted: Build) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = wanted.launch
    function = getattr(import_module(launch.module), launch.kernel)
    types, constants = dict(launch.types), dict(launch.constants)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    attributes = {(param.num,): [["tt.divisibility", 16]] for param in function.params if param.name in launch.aligned}
    options = {**dict(launch.options), "enable_fp_fusion": True}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", wanted.arch, 32), options=options)


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def worst_of_each_kernel(results: Sequence[Built]) -> list[Row]:
    """A row for each kernel and architecture: builds, failures, and the most that one build takes."""
    groups: dict[tuple[str, int], list[Built]] = {}
    for result in sorted(results, key=lambda result: (result.name.split(" ")[0], result.arch)):
        groups.setdefault((result.name.split(" ")[0], result.arch), []).append(result)
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
