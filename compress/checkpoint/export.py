"""Re-encodes a packed checkpoint in another format, bit for bit the same codes, or refuses and says why."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.config import HEAD, compression_block, is_embedding, packed_config
from compress.checkpoint.formats import compress_runtime, dense, find_format
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme
from compress.checkpoint.writer import MAX_SHARD_BYTES, PieceStore, assemble
from compress.common.errors import CheckpointError
from compress.common.files import REPORT_FILE, check_out_folder, partial_folder


def export_checkpoint(path: str | Path, format: str, out: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Writes the checkpoint at `path` to the new folder `out` as `compressed-tensors`, `gptq`, `awq` or `dense`.

    Everything that is not a quantized weight is copied as it is; `dense` dequantizes to the model's dtype, and so do
    formats of other tools with a packed embedding, which no other engine looks up.

    Raises:
        CheckpointError: `path` cannot be read or is not packed, or `out` exists or does not fit on the disk.
        SchemeError: the format cannot hold these integers or scales exactly; nothing is written.
    """
    target = check_out_folder(out)
    packed = PackedCheckpoint.open(path)
    codec = find_format(format)
    if not packed.schemes:
        raise CheckpointError(f"{packed.path} holds no quantized weights", "Quantize it first: compress quantize MODEL")
    schemes = _target_schemes(packed, format)
    for module, scheme in schemes.items():
        codec.check(scheme, packed.shape(module))
    unpacked = [module for module in packed.modules if module not in schemes]
    heads = {HEAD} if packed.tied and unpacked else set()
    config = packed_config(
        packed.config,
        codec.quantization_config(schemes, {*packed.dense_linears(), *heads}),
        packed.modules,
        compression_block(packed.config) or None,
    )
    store = PieceStore(partial_folder(target) / "pieces")
    store.discard()
    try:
        keys = _write_pieces(packed, format, schemes, store)
        # The report lists digests of codes, which what was dequantized no longer has.
        leave_out = {REPORT_FILE} if format == dense.NAME or unpacked else frozenset[str]()
        return assemble(store, keys, target, max_shard_bytes, config=config, source=packed.files, leave_out=leave_out)
    finally:
        store.discard()


def _write_pieces(packed: PackedCheckpoint, format: str, schemes: dict[str, Scheme], store: PieceStore) -> list[str]:
    for number, module in enumerate(packed.modules):
        codec = find_format(format) if module in schemes else dense
        weight = packed.packed_weight(module).stored_as(schemes.get(module, packed.schemes[module]))
        store.write(f"module-{number:05d}", codec.encode(module, weight, packed.dtype))
        packed.files.release()
    store.write("dense", {name: packed.tensor(name) for name in packed.dense_names()})
    return [f"module-{number:05d}" for number in range(len(packed.modules))] + ["dense"]


def _target_schemes(packed: PackedCheckpoint, format: str) -> dict[str, Scheme]:
    """Schemes as the target says them: formats of other tools store the zeros of sparse integers as codes, and AWQ
    stores zero points even when every one is the midpoint, where elsewhere such codes are symmetric. They have none
    for embeddings."""
    if format in (dense.NAME, compress_runtime.NAME):
        return packed.schemes
    schemes = {module: scheme.expanded for module, scheme in packed.schemes.items() if not is_embedding(module)}
    asymmetric = [module for module, scheme in schemes.items() if not scheme.symmetric]
    if asymmetric and all(packed.packed_weight(module).is_symmetric for module in asymmetric):
        return {module: scheme.as_symmetric for module, scheme in schemes.items()}
    return schemes
