"""The builds of what draws tokens: vocabularies of whole words and ragged ones, small and large."""

from __future__ import annotations

from benchmarking.kernel_builds import Build
from runtime.backends.triton.kernels.sampling import BLOCK, join_constants, listed_constants
from runtime.sampling.logits_processors import NUM_LIKELY

PARTS = (1, 16, 64, 128)
"""Of a row: up to 262144 tokens."""


def draw_builds(arch: int) -> list[Build]:
    parts = [
        Build.of(
            arch, f"draw_parts {'ragged' if ragged else 'whole'}", "sampling.draw_parts",
            "logits:fp32 scores:fp32 seeds:i64 positions:i64 temperature:fp64 sums:fp32 ids:i32",
            "V PARTS" if ragged else "V%16 PARTS", {"BLOCK": BLOCK}, converts=True, wide=not ragged,
        )
        for ragged in (False, True)
    ]  # fmt: skip
    joins = [
        Build.of(
            arch, f"join_parts {number}", "sampling.join_parts", "sums:fp32 ids:i32 temperature:fp64 tokens:i64",
            "PARTS", join_constants(number), converts=True,
        )
        for number in PARTS
    ]  # fmt: skip
    listed = Build.of(
        arch, "draw_listed", "sampling.draw_listed",
        "scores:fp32 ids:i64 truncated:i1 unknown:i1 seeds:i64 positions:i64 tokens:i64", "K",
        listed_constants(NUM_LIKELY), converts=True,
    )  # fmt: skip
    return [*parts, *joins, listed]
