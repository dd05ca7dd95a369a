"""Builds that Triton makes while a program runs: what each was made for, how long it took, and its machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Build:
    """Machine code of one kernel, and all that it depends on.

    Attributes:
        types: Triton type of every run-time argument, such as `*bf16` or `i32`.
        aligned: run-time arguments that are multiples of 16.
        constants: compile-time arguments, and integers equal to 1.
        seconds: of the compiler, or of reading the cache.
        cached: it was in Triton's cache.
        cubin: file with the machine code.
    """

    kernel: str
    arch: int
    types: tuple[tuple[str, str], ...]
    aligned: frozenset[str]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    shared_bytes: int
    seconds: float
    cached: bool
    cubin: Path

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key of the machine code: all that it depends on."""
        return self.kernel, self.arch, self.types, self.aligned, self.constants, self.num_warps, self.num_stages


def describe_build(
    source: Any, metadata: Mapping[str, Any], group: Mapping[str, str], times: Any, cached: bool
) -> Build:
    """Reads what Triton tells a listener of compilations.

    Args:
        source: a `triton.compiler.ASTSource`.
        group: paths of the files of the build, by name.
        times: durations in microseconds.
    """
    names = source.fn.arg_names
    # A path is longer than one index inside of a tuple, which is a constant here.
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    types = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
    return Build(
        source.name,
        metadata["target"].arch,
        tuple(types.items()),
        frozenset(names[path[0]] for path, value in source.attrs.items() if value and len(path) == 1),
        tuple(constants.items()),
        metadata["num_warps"],
        metadata["num_stages"],
        metadata["shared"],
        times.total / 1e6,
        cached,
        next(Path(path) for name, path in group.items() if name.endswith(".cubin")),
    )
