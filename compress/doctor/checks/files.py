"""Files: shards against their index, complete headers, and unused files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from compress.checkpoint.locate.file_names import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    WEIGHT_SUFFIXES,
)
from compress.checkpoint.safetensors import MappedFile
from compress.common.errors import CheckpointError
from compress.common.files import PARTIAL_SUFFIX, is_lfs_pointer, read_json
from compress.common.model_folder import GGUF_SUFFIX
from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding, Severity
from compress.doctor.view import listed

TEXT_SUFFIXES = frozenset(
    {".json", ".jinja", ".md", ".txt", ".csv", ".model", ".py", ".yaml", ".yml", ".tiktoken", ".sha256"}
)
PAGE_SUFFIXES = frozenset({".html", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"})
KNOWN_SUFFIXES = TEXT_SUFFIXES | PAGE_SUFFIXES | {".safetensors"}
KNOWN_NAMES = frozenset({"license", "licence", "notice", "copying", "readme", "use_policy", "version", "sha256sums"})
UNFINISHED = (".incomplete", ".part", ".tmp", ".aria2", ".crdownload", ".lock", PARTIAL_SUFFIX)


@CHECKS.register()
class Files(Check):
    """Checks names, sizes and headers; reads no weights and never opens a pickle."""

    name: ClassVar[str] = "files"

    def start(self) -> Iterator[Finding]:
        findings = [*self._json(), *self._headers(), *self._index(), *self._others()]
        yield from findings
        refusal = self.view.refusal
        if refusal and not any(each.severity is Severity.ERROR for each in findings):
            yield self.error("unreadable", self.view.path.name, refusal.problem, refusal.remedy)

    def facts(self) -> dict[str, str]:
        packed = self.view.packed
        if packed is None:
            return {}
        return {"files": f"{len(packed.files.files)} of weights, {packed.files.file_bytes / 1e6:,.2f} MB"}

    def _json(self) -> Iterator[Finding]:
        for path in sorted(self.view.path.glob("*.json")):
            try:
                read_json(path)
            except CheckpointError as error:
                yield self.error("bad-json", path.name, error.problem, error.remedy)

    def _headers(self) -> Iterator[Finding]:
        for path in filter(Path.is_file, sorted(self.view.path.glob("*.safetensors"))):
            if is_lfs_pointer(path):
                problem = f"it has {path.stat().st_size} bytes: a pointer of git-lfs, not the file"
                yield self.error("lfs-pointer", path.name, problem, "Run git lfs pull in the folder")
                continue
            try:
                MappedFile.open(path)
            except CheckpointError as error:
                yield self.error("bad-header", path.name, error.problem, f"Download {path.name} again")

    def _index(self) -> Iterator[Finding]:
        shards = self._shards()
        stored = {path.name for path in self.view.path.glob("*.safetensors")}
        for name in sorted(shards.keys() - stored):
            problem = f"the index places {len(shards[name])} tensors in this shard, which is missing"
            yield self.error("missing-shard", name, problem, f"Download {name}, or finish the download")
        for name in sorted(shards.keys() & stored):
            yield from self._contents(name, shards[name])
        for name in sorted(stored - shards.keys() if shards else ()):
            problem = "the index names no tensor in this file, so it is not read"
            yield self.warning("unread-weights", name, problem, f"Remove {name}, or download the index of its revision")

    def _shards(self) -> dict[str, set[str]]:
        """Returns names of tensors by shard from the index; empty for a model of one file."""
        path = self.view.path / INDEX_FILE
        if not path.is_file() or (self.view.path / SINGLE_FILE).is_file():
            return {}
        try:
            weight_map: Any = read_json(path)["weight_map"]
            shards: dict[str, set[str]] = {}
            for tensor, shard in weight_map.items():
                shards.setdefault(str(shard), set()).add(tensor)
        except (CheckpointError, KeyError, TypeError, AttributeError):
            return {}
        return shards

    def _contents(self, name: str, announced: set[str]) -> Iterator[Finding]:
        try:
            held = set(MappedFile.open(self.view.path / name).entries)
        except CheckpointError:
            return
        remedy = "Download the index and its shards again, from one revision"
        if missing := sorted(announced - held):
            problem = f"the index places {len(missing)} tensors here that it does not hold: {listed(missing)}"
            yield self.error("index-mismatch", name, problem, remedy)
        if unlisted := sorted(held - announced):
            problem = f"it holds {len(unlisted)} tensors that the index does not name: {listed(unlisted)}"
            yield self.warning("index-mismatch", name, problem, remedy)

    def _others(self) -> Iterator[Finding]:
        weights = {file.path.name for file in self.view.packed.files.files} if self.view.packed else set()
        has_weights = any(self.view.path.glob("*.safetensors")) or any(self.view.path.glob(f"*{GGUF_SUFFIX}"))
        for path in sorted(self.view.path.iterdir()):
            if not path.name.startswith(".") and path.name not in weights:
                yield from self._other(path, has_weights)

    def _other(self, path: Path, has_weights: bool) -> Iterator[Finding]:
        suffix = path.suffix.lower()
        remedy = f"Remove {path.name} if nothing else needs it"
        if suffix in UNFINISHED:
            yield self.warning("unfinished", path.name, "it is left over from an unfinished run", remedy)
        elif path.is_dir():
            return
        elif path.stat().st_size == 0:
            yield self.warning("empty-file", path.name, "it is empty", f"Download {path.name} again, or remove it")
        elif suffix in PICKLE_SUFFIXES:
            problem = "a pickle, which can run code when read; it was not opened"
            unread = f"{remedy}; the safetensors files are read" if has_weights else "Convert it to safetensors"
            yield self.warning("pickle", path.name, problem, unread)
        elif suffix in WEIGHT_SUFFIXES - {".safetensors"}:
            yield self.warning("unread-weights", path.name, f"{suffix} files next to the weights are not read", remedy)
        elif suffix not in KNOWN_SUFFIXES and path.stem.lower() not in KNOWN_NAMES:
            yield self.warning("unknown-file", path.name, "no file of a checkpoint has this kind of name", remedy)
