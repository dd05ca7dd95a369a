"""Triton's cache of compiled kernels as one archive that another machine or another start can use."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from compress.common.cli import tool_version
from compress.common.errors import ToolkitError
from runtime.backends.triton import device as gpus

GROUP, CHILDREN = "__grp__", "child_paths"
"""Prefix of the file that lists the files of a kernel, and the key under which it has their absolute paths."""
LOADED = (".cubin", ".json")
"""Files of a kernel that are read when it is loaded; the stages before machine code take ten times their room."""
KNOWN = (*LOADED, ".so")
"""Endings of files in an archive; libraries are Triton's launchers."""
UNWRITTEN_BYTES = 2**21
"""Bytes that the compressor may hold back (the uncompressed size of an LZMA2 chunk)."""
FACTS = "facts.json"
"""First file of an archive that only suits machines like the one where it was made: what must be alike."""


def kernel_facts(device: torch.device) -> dict[str, str]:
    """Names and values of what compiled kernels of a GPU depend on in addition to their sources and Triton's.

    Raises:
        ToolkitError: this machine has no such GPU, or no Triton.
    """
    gpu = gpus.gpu_of(device)
    if (reason := gpus.device_unsupported_reason(device)) or gpu is None:
        raise ToolkitError(
            f"no kernels can be compiled on {device}: Triton {reason or 'finds no NVIDIA GPU'}",
            "Run this on a machine with the GPU that is to serve the model",
        )
    from triton import __version__ as triton_version

    major, minor = gpu.capability
    return {
        "Triton": triton_version,
        "GPU architecture": f"sm_{major}{minor}",
        "toolkit": tool_version(),
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": sys.platform,
    }


def cache_folder() -> Path:
    """Triton's cache folder of this process."""
    from triton import knobs

    return Path(knobs.cache.dir)


@contextmanager
def noting_entries() -> Iterator[set[str]]:
    """Collects the names of cache entries that kernels are compiled into or read from during the block."""
    from triton import knobs

    entries, before = set[str](), knobs.compilation.listener

    def listen(*, metadata_group: Mapping[str, str], **facts: Any) -> None:
        entries.update(Path(path).parent.name for path in metadata_group.values())
        if before is not None:
            before(metadata_group=metadata_group, **facts)

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        yield entries


def pack_kernels(
    folder: Path,
    archive: Path,
    most_bytes: int | None = None,
    facts: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> tuple[int, int]:
    """Packs the kernels and launchers of a cache folder into a `.tar.xz`.

    Args:
        facts: that another machine must share; None lets every machine unpack it.
        only: names of entries with the kernels to pack; None packs all. Launchers are packed in any case.

    Returns:
        How many of its entries are in the archive, and how many would have made it larger than `most_bytes`.
    """
    entries = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if only is not None:
        entries = [entry for entry in entries if entry.name in only or any(entry.glob("*.so"))]
    packed, partial = 0, archive.with_name(archive.name + ".partial")
    # The fastest preset: the default takes four times as long for a third less room.
    with partial.open("wb") as stream, tarfile.open(fileobj=stream, mode="w:xz", preset=1) as tar:
        if facts is not None:
            _add(tar, FACTS, json.dumps(dict(facts)).encode())
        for entry in entries:
            if most_bytes is not None and stream.tell() + UNWRITTEN_BYTES > most_bytes:
                break
            for name, content in _files_of(entry):
                _add(tar, f"{entry.name}/{name}", content)
            packed += 1
    partial.replace(archive)
    return packed, len(entries) - packed


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    facts = tarfile.TarInfo(name)
    facts.size = len(content)
    tar.addfile(facts, io.BytesIO(content))


def _files_of(entry: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents, with names in place of the paths in lists of files. Unfinished files are left out."""
    groups = {path.name: _children(path) for path in entry.glob(f"{GROUP}*.json")}
    dropped = {name for children in groups.values() for name in children if not name.endswith(LOADED)}
    for path in sorted(path for path in entry.iterdir() if path.is_file() and path.name.endswith(KNOWN)):
        if path.name in groups:
            kept = {name: name for name in groups[path.name] if name not in dropped}
            yield path.name, json.dumps({CHILDREN: kept}).encode()
        elif path.name not in dropped:
            yield path.name, path.read_bytes()


def unpack_kernels(archive: Path, folder: Path, facts: Mapping[str, str] | None = None) -> int:
    """Adds the entries of an archive that a cache folder lacks, and returns how many it holds. The archive holds
    programs, so it must come from someone who may run programs here.

    Args:
        facts: of this machine; None unpacks whatever the archive is made for.

    Raises:
        ToolkitError: this is not a kernel archive, or is one for other machines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = set()
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                if member.name == FACTS:
                    _compare(archive, json.load(tar.extractfile(member) or io.BytesIO()), facts)
                    continue
                found.add(_checked(archive, member))
                content = tar.extractfile(member)
                if content is not None and not (folder / member.name).exists():
                    (folder / member.name).parent.mkdir(exist_ok=True)
                    (folder / member.name).write_bytes(content.read())
    except (OSError, ValueError, tarfile.TarError, EOFError) as error:
        raise ToolkitError(f"{archive} is not a kernel archive: {error}", "Make it by `runtime warm-up`") from error
    for group in (group for entry in found for group in (folder / entry).glob(f"{GROUP}*.json")):
        children = {name: str(group.parent / name) for name in _children(group)}
        group.write_text(json.dumps({CHILDREN: children}), encoding="utf-8")
    return len(found)


def _compare(archive: Path, made_for: Mapping[str, str], here: Mapping[str, str] | None) -> None:
    known = made_for if here is None else here
    pairs = [(name, value, known.get(name)) for name, value in made_for.items()]
    if differing := [f"{name} {there}, here {own}" for name, there, own in pairs if there != own]:
        raise ToolkitError(
            f"{archive} has kernels of another machine: {'; '.join(differing)}",
            "Make one here with `runtime warm-up MODEL --export FILE`",
        )


def _checked(archive: Path, member: tarfile.TarInfo) -> str:
    """Name of the cache entry of a file."""
    entry, *names = Path(member.name).parts
    if not (member.isfile() and len(names) == 1 and entry.isalnum() and names[0].endswith(KNOWN)):
        raise ToolkitError(
            f"{archive} is not a kernel archive: it has {member.name!r:.80}", "Make it by `runtime warm-up`"
        )
    return entry


def _children(group: Path) -> list[str]:
    """Names of the files of a kernel, all of them in its own folder."""
    return [Path(name).name for name in json.loads(group.read_text(encoding="utf-8"))[CHILDREN]]
