"""Reports of a run as data: `compression_config` of config.json and `compression_report.json`."""

from __future__ import annotations

import platform
from typing import Any

from compress.checkpoint.verify import StructureReport
from compress.common.cli import DISTRIBUTION, tool_version
from compress.methods.shared.column_solver import column_kernel
from compress.pipeline.prepare import RunContext, describe_calibration
from compress.pipeline.resume import Progress


def provenance(prepared: RunContext, progress: Progress) -> dict[str, Any]:
    """Return `compression_config`: where a checkpoint came from. Equal runs give equal values."""
    request = prepared.request
    return {
        "source": request.source,
        "recipe": request.recipe.to_dict(),
        "seed": request.recipe.seed,
        "tool": f"{DISTRIBUTION} {tool_version()}",
        "calibration": describe_calibration(request.recipe, prepared.sequences),
        "dense": {
            row.tensor.removesuffix(".weight"): row.reason
            for row in prepared.plan.rows
            if row.reason and len(row.shape) > 1
        }
        | _kept_whole(prepared, progress),
    }


def _kept_whole(prepared: RunContext, progress: Progress) -> dict[str, str]:
    """Layers whose block decided that they stay whole and dense, with the reason."""
    blocks = (progress.facts(index) for index in range(prepared.skeleton.num_blocks))
    linears = (linear for facts in blocks for linear in facts["linears"] if linear["module"] not in facts["schemes"])
    return {linear["module"]: linear["kept_whole"] for linear in linears if linear["kept_whole"]}


def full_report(
    prepared: RunContext,
    progress: Progress,
    structure: StructureReport,
    quality: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Return `compression_report.json`: plan, every block's losses and fallbacks, verification and quality.

    Args:
        seconds: wall time of this process's part; an earlier, killed part is not counted.
    """
    num_blocks = prepared.skeleton.num_blocks
    facts = progress.all_facts(num_blocks)
    recovered = [each for block in facts for each in block["linears"] if each["recovery"]]
    return {
        "format_version": 1,
        **provenance(prepared, progress),
        "environment": environment(prepared),
        "plan": prepared.to_dict(),
        "recovered": recovered,
        "blocks": facts[:num_blocks],
        "ends": facts[num_blocks:],
        "structure": structure.as_dict() | {"path": str(prepared.request.out)},
        "bit_compared": sum(len(block["digests"]) for block in facts),
        "quality": quality,
        "seconds": round(seconds, 2),
    }


def environment(prepared: RunContext) -> dict[str, Any]:
    """Return the versions and devices that may change the last bits of a result."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if prepared.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "columns": column_kernel(prepared.device),
    }
