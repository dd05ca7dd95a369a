"""Packs Triton's cache into an archive of bounded size, or unpacks one that was brought along.

python scripts/checking/kernel_archive.py pack FOLDER ARCHIVE
python scripts/checking/kernel_archive.py unpack FOLDER ARCHIVE
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.backends.triton.kernel_cache import pack_kernels, unpack_kernels

MOST_BYTES = 15 * 2**20


def main(verb: str, folder: Path, archive: Path) -> None:
    if verb == "unpack":
        print(f"{unpack_kernels(archive, folder)} kernels and launchers unpacked")
    else:
        packed, left = pack_kernels(folder, archive, MOST_BYTES)
        print(f"{packed} kernels and launchers in {archive.stat().st_size / 1e6:.1f} MB, {left} left out")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
