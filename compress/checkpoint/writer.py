"""Resumable writing: pieces appended one by one, then streamed into the final safetensors file or shards.

    BlockStore.write(key, tensors)   one atomic file per finished block; a killed run keeps what it finished
    assemble(store, keys, out)       pieces -> out.partial/assembled/ -> renamed to out/

Pieces are private to a run: readers of a checkpoint never see them.

`export_checkpoint` re-encodes a packed checkpoint in another format, bit for bit the same codes, or refuses.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from compress.checkpoint.config import (
    CONFIG_FILE,
    HEAD,
    QUANTIZATION_FILES,
    QUANTIZATION_KEY,
    compression_block,
    format_name,
    is_embedding,
    packed_config,
    quantization_block,
    write_config,
)
from compress.checkpoint.dequantized import dequantized_files
from compress.checkpoint.expert_files import join_experts, stacked_names
from compress.checkpoint.formats import check_held
from compress.checkpoint.formats.base import CONTAINERS, Container
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.kv_cache import stored_kv_cache, with_kv_cache
from compress.checkpoint.locate.file_names import INDEX_FILE, SINGLE_FILE
from compress.checkpoint.reader import REORDERED, PackedCheckpoint
from compress.checkpoint.safetensors import (
    MappedFile,
    TensorFiles,
    build_header,
    storage_order,
    tensor_bytes,
)
from compress.checkpoint.weights import Scheme
from compress.common.errors import CheckpointError
from compress.common.files import (
    PARTIAL_SUFFIX,
    RECEIPT_FILE,
    REPORT_FILE,
    atomic_file,
    check_out_folder,
    check_space,
    partial_folder,
    refuse_when_full,
    sync,
)
from compress.models.wrappers import StoredNames

MAX_SHARD_BYTES = 4 * 2**30
STORAGE_FILE = "quantization_config.json"
"""List of the tensors of a checkpoint, which exllamav3 writes and its loader does not read."""
REWRITTEN = frozenset({CONFIG_FILE, RECEIPT_FILE, STORAGE_FILE, *QUANTIZATION_FILES})
"""Side files of a source that a new checkpoint rewrites or leaves out instead of copying."""


@dataclass(frozen=True)
class BlockStore:
    """A folder of pieces, each a safetensors file named by its key, each complete or absent."""

    folder: Path

    def write(
        self,
        key: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
        source: TensorFiles | None = None,
    ) -> None:
        """Stores a piece, replacing an older one of this key. Equal input gives equal bytes.

        Args:
            key: letters, digits, `.`, `_` and `-`.
            tensors: by full name.
            metadata: JSON-able facts to find again with `read_metadata`.
            source: where tensors are mapped from: its pages are given back after each.

        Raises:
            CheckpointError: disk full; the store is as before.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._path(key)) as stream:
            order = storage_order((name, tensor.dtype) for name, tensor in tensors.items())
            layout = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in order}
            stream.write(build_header(layout, {"piece": json.dumps(dict(metadata or {}), sort_keys=True)}))
            for name in order:
                stream.write(tensor_bytes(tensors[name]))
                if source is not None:
                    source.release()

    def has(self, key: str) -> bool:
        return self._path(key).is_file()

    def open(self, key: str) -> MappedFile:
        """Opens a piece, memory-mapped. Raises CheckpointError if it is absent or damaged."""
        if not self.has(key):
            raise CheckpointError(f"piece {key!r} is missing from {self.folder}", "Run the same command with --restart")
        try:
            return MappedFile.open(self._path(key))
        except CheckpointError as error:
            raise CheckpointError(error.problem, "Run the same command again to recreate it") from error

    def remove(self, key: str) -> None:
        """Removes a piece, if it exists."""
        self._path(key).unlink(missing_ok=True)

    def read_metadata(self, key: str) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.open(key).metadata["piece"]))

    def discard(self) -> None:
        """Removes the folder with everything in it, and the `.partial` folder around it when nothing else is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.name.endswith(PARTIAL_SUFFIX):
            _remove_if_empty(self.folder.parent)

    def _path(self, key: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", key):
            raise ValueError(f"piece key {key!r} may only have letters, digits, '.', '_' and '-'")
        return self.folder / f"{key}.safetensors"


def assemble(
    store: BlockStore,
    keys: Iterable[str],
    out: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    config: Mapping[str, Any] | None = None,
    source: TensorFiles | None = None,
    leave_out: Set[str] = frozenset(),
) -> Path:
    """Streams pieces into a checkpoint folder, one tensor in memory at a time; `out` appears at the end, whole.

    Args:
        store: where the pieces are; they stay there.
        keys: pieces in the order of the model.
        out: must not exist. Built in `out.partial/assembled`, then renamed.
        max_shard_bytes: up to this size one `model.safetensors` is written, above it shards with an index.
        config: config.json of the new checkpoint; None writes none.
        source: the model whose tokenizer, templates and other side files are copied verbatim.
        leave_out: side files of `source` that are not copied.

    Returns:
        `out`.

    Raises:
        CheckpointError: `out` exists, a tensor appears in two pieces, or the disk is full; no file remains.
    """
    check_out_folder(out)
    layout = None if source is None else source.text_names
    pieces = [store.open(key) for key in keys]
    if layout is not None:
        stored = layout.stored
        pieces = [
            replace(piece, entries={stored(name): entry for name, entry in piece.entries.items()}) for piece in pieces
        ]
    building = partial_folder(out) / "assembled"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        with refuse_when_full(out):
            check_space(building, _bytes_needed(pieces, source))
            if source is not None:
                copy_side_files(source, building, leave_out)
            if config is not None:
                write_config(building, config if layout is None else _named_as_stored(config, layout, pieces))
            _write_shards(_plan_shards(pieces, max_shard_bytes), building)
            building.rename(out)
            sync(out.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        _remove_if_empty(partial_folder(out))
    return out


def _named_as_stored(config: Mapping[str, Any], layout: StoredNames, pieces: Iterable[MappedFile]) -> Mapping[str, Any]:
    quantization = quantization_block(config)
    if format_name(quantization) != COMPRESSED_TENSORS.name:
        return config
    return {
        **config,
        QUANTIZATION_KEY: layout.patterns(quantization, {name for piece in pieces for name in piece.entries}),
    }


def copy_side_files(source: TensorFiles, out: Path, leave_out: Set[str] = frozenset()) -> None:
    """Copies everything of a model that is neither a weight nor rewritten (config.json), byte for byte."""
    for file in source.side_files():
        relative = file.relative_to(source.path)
        if str(relative) not in REWRITTEN | leave_out:
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / relative)


Shard = dict[str, MappedFile]
"""Tensor names of one output file, each with the piece that holds it."""


def _plan_shards(pieces: list[MappedFile], max_shard_bytes: int) -> list[Shard]:
    """Fills shards in the order of the pieces, so that a block's tensors stay together."""
    shards: list[Shard] = [{}]
    used, seen = 0, set()
    for piece in pieces:
        for name, entry in piece.entries.items():
            if name in seen:
                raise CheckpointError(f"tensor {name!r} was written twice", "Run the same command with --restart")
            seen.add(name)
            if shards[-1] and used + entry.nbytes > max_shard_bytes:
                shards.append({})
                used = 0
            shards[-1][name] = piece
            used += entry.nbytes
    return shards


def _write_shards(shards: list[Shard], folder: Path) -> None:
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for shard, name in zip(shards, names, strict=True):
        _write_shard(shard, folder / name)
    if len(shards) > 1:
        weight_map = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
        total = sum(piece.entries[name].nbytes for shard in shards for name, piece in shard.items())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with atomic_file(folder / INDEX_FILE) as stream:
            stream.write(json.dumps(index, indent=2).encode() + b"\n")


def _write_shard(shard: Shard, path: Path) -> None:
    order = storage_order((name, piece.entries[name].dtype) for name, piece in shard.items())
    layout = {name: (shard[name].entries[name].dtype, shard[name].entries[name].shape) for name in order}
    with atomic_file(path) as stream:
        stream.write(build_header(layout, {"format": "pt"}))
        for name in order:
            stream.write(tensor_bytes(shard[name].tensor(name)))
            shard[name].memory.release()


def _bytes_needed(pieces: list[MappedFile], source: TensorFiles | None) -> int:
    files = [piece.path for piece in pieces] + ([] if source is None else source.side_files())
    return sum(file.stat().st_size for file in files)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def export_checkpoint(path: str | Path, format: str, out: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Writes the checkpoint at `path` to the new folder `out`, see `write_checkpoint`. Raises CheckpointError: it holds
    no quantized weights, or `out` exists."""
    target, packed = check_out_folder(out), PackedCheckpoint.open(path)
    if not packed.schemes:
        raise CheckpointError(f"{packed.path} holds no quantized weights", "Quantize it first: compress quantize MODEL")
    return write_checkpoint(packed, format, target, max_shard_bytes)


def write_checkpoint(packed: PackedCheckpoint, format: str, out: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Writes a checkpoint to the new folder `out` as `compressed-tensors`, `gptq`, `awq` or `dense`.

    Everything that is not a quantized weight is copied as it is; `dense` dequantizes to the model's dtype, and so do
    formats of other tools with a packed embedding, which no other engine looks up.

    Raises:
        CheckpointError: it cannot be read, or `out` does not fit on the disk.
        SchemeError: the format cannot hold these integers or scales exactly; nothing is written.
    """
    codec = CONTAINERS.find(format)
    schemes, description = described(packed, codec)
    unpacked = [module for module in packed.modules if module not in schemes]
    config = packed_config(
        packed.config,
        description,
        packed.modules,
        compression_block(packed.config) or None,
    )
    store = BlockStore(partial_folder(out) / "pieces")
    store.discard()
    try:
        keys = _write_pieces(packed, format, schemes, store)
        # The report lists digests of codes, which what was dequantized no longer has.
        leave_out = {REPORT_FILE} if unpacked or (packed.schemes and format == DENSE.name) else frozenset[str]()
        return assemble(store, keys, out, max_shard_bytes, config=config, source=packed.files, leave_out=leave_out)
    finally:
        store.discard()


def described(packed: PackedCheckpoint, codec: Container) -> tuple[dict[str, Scheme], dict[str, Any]]:
    """Schemes of the modules that stay packed in a format, and its `quantization_config`. Raises as `export_checkpoint`
    where the format cannot hold them."""
    if packed.files.text_names is not None and codec.name not in _NAMED_BY_PATTERNS:
        raise CheckpointError(
            f"modules of {packed.path} have other names in files than in engines, which {codec.name} cannot say",
            f"Export it as {' or '.join(_NAMED_BY_PATTERNS)}",
        )
    if packed.reordered and codec is not DENSE:
        raise CheckpointError(
            f"{len(packed.reordered)} modules of {packed.path} have {REORDERED}",
            f"Use --format dense, or quantize again: compress quantize {packed.path} --out OTHER",
        )
    schemes = _target_schemes(packed, codec.name)
    for module, scheme in schemes.items():
        check_held(codec, scheme, packed.shape(module))
    unpacked = packed.schemes.keys() - schemes.keys()
    heads = {HEAD} if packed.tied and unpacked else set()
    description = codec.quantization_config(schemes, {*packed.dense_linears(), *heads})
    return schemes, with_kv_cache(description, stored_kv_cache(packed.config))


_NAMED_BY_PATTERNS = (COMPRESSED_TENSORS.name, COMPRESS_RUNTIME.name, DENSE.name)


def _write_pieces(packed: PackedCheckpoint, format: str, schemes: dict[str, Scheme], store: BlockStore) -> list[str]:
    values = dequantized_files(packed) if format == DENSE.name else packed.files
    # Dense experts are stored as transformers reads them.
    stacks = stacked_names(values.names(), packed.config) if format == DENSE.name else {}
    joined = set(chain.from_iterable(stacks.values()))
    for number, names in enumerate(stacks.values()):
        store.write(f"stack-{number:05d}", join_experts({name: values.tensor(name) for name in names}, packed.config))
        packed.files.release()
    container, modules = CONTAINERS.find(format), [each for each in packed.modules if f"{each}.weight" not in joined]
    for number, module in enumerate(modules):
        codec, name = container if module in schemes else DENSE, f"{module}.weight"
        if module in packed.reordered:
            store.write(f"module-{number:05d}", {name: packed.values(module, packed.dtype)})
        else:
            weight = packed.packed_weight(module).stored_as(schemes.get(module, packed.schemes[module]))
            store.write(f"module-{number:05d}", codec.encode(module, weight, packed.dtype))
        packed.files.release()
    dense = {name: packed.tensor(name) for name in packed.dense_names() if name not in joined}
    biases = {f"{module}.bias" for module in schemes} & dense.keys()
    store.write("dense", dense | {name: container.encode_bias(dense[name]) for name in biases})
    counts = {"stack": len(stacks), "module": len(modules)}
    return [*(f"{kind}-{number:05d}" for kind, count in counts.items() for number in range(count)), "dense"]


def _target_schemes(packed: PackedCheckpoint, format: str) -> dict[str, Scheme]:
    """Schemes as the target says them: formats of other tools store the zeros of sparse integers as codes, and AWQ
    stores zero points even when every one is the midpoint, where elsewhere such codes are symmetric. They have none
    for embeddings."""
    if format in (DENSE.name, COMPRESS_RUNTIME.name):
        return packed.schemes
    schemes = {module: scheme.expanded for module, scheme in packed.schemes.items() if not is_embedding(module)}
    asymmetric = [module for module, scheme in schemes.items() if not scheme.symmetric]
    if asymmetric and all(packed.packed_weight(module).is_symmetric for module in asymmetric):
        return {module: scheme.as_symmetric for module, scheme in schemes.items()}
    return schemes
