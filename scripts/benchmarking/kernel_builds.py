"""GPU kernels compiled ahead of time: which builds there are, and what the machine code of each must look like."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may have, by architecture."""
SPILL_LIMIT = {80: 16}
"""Bytes of stack that pass on an A100: norms of sums in 16 splits have as many, and attention in places."""
LAUNCHED_WARPS = 4
"""Where a launch does not say."""
TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "IGMMA")
CONVERSIONS = ("I2F", "I2FP")
MAX_CONVERSIONS = 16
"""Some are made once for each scale and index; a code that is converted by itself costs at least 32 of them a tile."""


@dataclass(frozen=True)
class Build:
    """One kernel in one configuration for one architecture.

    Attributes:
        module, kernel: where the kernel stands.
        types: of its run-time arguments by name: `*bf16`, `i32`.
        aligned: arguments that are always multiples of 16.
        constants: values of its compile-time arguments, and `num_warps`, as a launch has them.
        wants: instructions of which one must be present; none if empty.
        converts: codes may be converted one by one, as those of 8 bits are.
        wide: some load must take 16 bytes at once.
        tried: only when a table is measured, which passes over what spills or does not fit.
    """

    arch: int
    name: str
    module: str
    kernel: str
    types: dict[str, str]
    aligned: frozenset[str]
    constants: dict[str, Any]
    wants: tuple[str, ...] = ()
    converts: bool = False
    wide: bool = False
    tried: bool = False

    @classmethod
    def of(
        cls, arch: int, name: str, path: str, pointers: str, integers: str, constants: dict[str, Any], **rules: Any
    ) -> Build:
        """A build in short words: path `norm_act.finish_rows` (below the Triton kernels, or whole from `compress.` on),
        pointers `part:fp32 y:bf16`, integers `M N%16`, where `%16` marks what is always a multiple of 16, as pointers
        are; a number of another type is `scale:fp32`."""
        module, _, kernel = path.rpartition(".")
        pairs = [word.split(":") for word in pointers.split()]
        types = {f"{pointer}_ptr": f"*{kind}" for pointer, kind in pairs}
        aligned = {*types, *(word.removesuffix("%16") for word in integers.split() if word.endswith("%16"))}
        for word in integers.split():
            argument, _, kind = word.removesuffix("%16").partition(":")
            types[argument] = kind or "i32"
        place = module if module.startswith("compress.") else f"runtime.backends.triton.kernels.{module}"
        return cls(arch, name, place, kernel, types, frozenset(aligned), constants, **rules)


@dataclass(frozen=True)
class Built:
    """What came out. Instructions are counted by their first word over the whole kernel."""

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


def build(wanted: Build) -> Built:
    """Compiles one kernel and checks it; a compiler's refusal is a problem like any other."""
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
    problems = list(_problems(wanted, stack, shared_bytes, counts))
    if wanted.wide and not re.search(r"\bLDG\S*\.128", code):
        problems.append("no load of 16 bytes")
    return Built(wanted.name, wanted.arch, registers, stack, shared_bytes, dict(counts), tuple(problems))


def _problems(wanted: Build, stack: int, shared_bytes: int, counts: Counter[str]) -> list[str]:
    found = []
    if stack > SPILL_LIMIT.get(wanted.arch, 0) and not wanted.tried:
        found.append(f"spills: {stack} bytes of stack, {counts['LDL']} loads, {counts['STL']} stores")
    if shared_bytes > SHARED_MEMORY_LIMIT[wanted.arch] and not wanted.tried:
        found.append(f"{shared_bytes} bytes of shared memory, {SHARED_MEMORY_LIMIT[wanted.arch]} are there")
    if wanted.wants and not any(counts[each] for each in wanted.wants):
        found.append(f"none of {', '.join(wanted.wants)}")
    conversions = sum(counts[each] for each in CONVERSIONS)
    if conversions > MAX_CONVERSIONS and not wanted.converts:
        found.append(f"{conversions} conversions of integers")
    return found


def _compile(wanted: Build) -> Any:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(wanted.module), wanted.kernel)
    signature = {name: wanted.types.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (param.num,): [["tt.divisibility", 16]]
        for param in function.params
        if param.name in wanted.aligned and not param.do_not_specialize_on_alignment
    }
    constants = {"num_warps": LAUNCHED_WARPS, **wanted.constants}
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", wanted.arch, 32), options=options)


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def all_builds(arch: int, every: bool = False) -> list[Build]:
    """Every kernel and configuration that can be chosen on an architecture; `every`: attention in every combination of
    its many choices, and not only every two of them together."""
    from benchmarking.attention_builds import attention_builds
    from benchmarking.column_builds import column_builds
    from benchmarking.draw_builds import draw_builds
    from benchmarking.fp8_builds import fp8_builds
    from benchmarking.linear_builds import linear_builds
    from benchmarking.step_builds import step_builds

    linears = linear_builds(arch) + fp8_builds(arch)
    return linears + attention_builds(arch, every) + column_builds(arch) + step_builds(arch) + draw_builds(arch)
