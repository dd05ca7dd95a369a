"""Prints versions, tools and the GPU of this machine; exits with status 1 where there is no GPU.

python scripts/checking/facts.py       # or `facts.py cpu` where none is wanted
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys

PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "pytest-xdist", "hypothesis", "safetensors")
TOOLS = ("nvcc", "gcc", "ptxas", "compute-sanitizer", "ncu", "nvidia-smi")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    import torch

    print(f"python {platform.python_version()}", *(f"{each} {version(each)}" for each in PACKAGES), sep=", ")
    print(*(f"{tool} {shutil.which(tool) or 'not installed'}" for tool in TOOLS), sep=", ")
    if sys.argv[1:] == ["cpu"]:
        return 0
    if not torch.cuda.is_available():
        print("error: there is no NVIDIA GPU here")
        return 1
    properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    print(f"{properties}, CUDA {torch.version.cuda}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    return 0


if __name__ == "__main__":
    sys.exit(main())
