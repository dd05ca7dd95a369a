"""What somebody else must know to compare figures: versions, hardware, weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Versions and hardware: what somebody else must know to compare."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
    }


def weights_sha256(model: Path) -> str:
    """Hash of the weight files of a model folder, in name order."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
