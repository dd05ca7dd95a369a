"""Verification of a checkpoint on disk: structure, names, shapes, ranges and digests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.config import compression_block, quantization_block
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.kv_cache import measured_kv_caches, stored_kv_cache
from compress.checkpoint.reader import REORDERED, PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.state_dtype import measured_states
from compress.checkpoint.weights.base import Weight, digest, nonfinite_problems
from compress.common.errors import CheckpointError, SchemeError
from compress.common.files import REPORT_FILE, read_json
from compress.models.registry import find_family


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """Unquantized tensor, with the reason."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class StructureReport:
    """Structure of a checkpoint, and its problems.

    Attributes:
        format: `compressed-tensors`, `gptq`, `awq`, `compress-runtime` or `dense`.
        problems: one line each; empty when the structure is sound.
        quantized: scheme of every quantized module, as text.
        dense: every other tensor.
        num_parameters: weights of the model, quantized or not.
        num_quantized: weights in quantized modules.
        quantized_bytes: stored codes, scales and zero points.
        total_bytes: size of the weight files.
        notes: checks that could not be made, and why.
    """

    path: str
    format: str
    problems: tuple[str, ...]
    quantized: dict[str, str]
    dense: tuple[DenseTensor, ...]
    num_parameters: int
    num_quantized: int
    quantized_bytes: int
    total_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight; 0 when nothing is quantized."""
        return 8 * self.quantized_bytes / self.num_quantized if self.num_quantized else 0.0

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per weight of the whole model, headers and dense tensors included."""
        return 8 * self.total_bytes / self.num_parameters if self.num_parameters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        figures = {"bits_per_weight": self.bits_per_weight, "bits_per_parameter": self.bits_per_parameter}
        return {"ok": self.ok, **asdict(self), **figures}


UNCOMPARED = "shapes were not compared with the config: unknown model type"

BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "position_ids")
"""Tensors that older releases of transformers stored and that are not read."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every parameter by tensor name."""


def implied_shapes(config: Mapping[str, Any]) -> tuple[Shapes, str]:
    """Derives the parameters that config.json implies: none for a model type that no family describes, and the problem
    for values that define no model."""
    describe = find_family(config.get("model_type"))
    if describe is None:
        return {}, ""
    try:
        return describe(config).parameters(), ""
    except CheckpointError as error:
        return {}, error.problem


def weight_problems(packed: PackedCheckpoint, module: str, weight: Weight, implied: Shapes) -> Iterator[str]:
    """Yields a line per problem with the shape, size or values of one packed weight."""
    expected = implied.get(f"{module}.weight")
    if expected and expected != weight.shape:
        yield f"{module} is {weight.shape}, but config.json says {expected}"
    yield from weight.problems(module)
    if weight.scheme.is_exact_size:
        yield from _size_problems(packed, module, weight)


def _size_problems(packed: PackedCheckpoint, module: str, weight: Weight) -> Iterator[str]:
    promised = weight.scheme.stored_bits(*weight.shape, 8 * packed.dtype.itemsize)
    stored = 8 * packed.weight_bytes(module)
    if stored != promised:
        yield f"{module} takes {stored} bits, but {weight.scheme} of {weight.shape} means {promised}"


def verify_against(path: str | Path, expected: Mapping[str, str]) -> list[str]:
    """Compares what is stored with the digests taken when it was made.

    Args:
        expected: digest by name: of every quantized module, and of any dense tensors.

    Returns:
        One line per name that differs, is missing or was not expected; empty when all agree.
    """
    packed = PackedCheckpoint.open(path)
    problems = [
        f"{name} is stored quantized but has no recorded digest" for name in packed.modules if name not in expected
    ]
    for name, recorded in expected.items():
        if name in packed.schemes:
            if digest(packed.packed_weight(name)) != recorded:
                problems.append(f"{name} reads back with other codes, scales or zero points than were chosen")
        elif name not in packed.files:
            problems.append(f"{name} was written but is not stored so any more")
        elif digest(packed.tensor(name)) != recorded:
            problems.append(f"{name} reads back with other bytes than were written")
        packed.files.release()
    return problems


def recorded_digests(folder: Path) -> dict[str, str] | None:
    """Reads the digest of every module from `compression_report.json`; None where there is no such report.

    Raises:
        CheckpointError: the report cannot be read.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    try:
        report = read_json(path, "Remove it to skip this")
        finished = [*report["blocks"], *report.get("ends", ())]
        return {module: value for block in finished for module, value in block["digests"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a report of this toolkit: {error!r}", "Remove it to skip this") from error


def verify_structure(path: str | Path, source: TensorFiles | None = None) -> StructureReport:
    """Checks config, names, shapes, dtypes, code ranges and finiteness of a whole checkpoint, module by module.

    Args:
        path: the packed (or dense) checkpoint.
        source: the dense model it was made from, when at hand: then every tensor of it must be found again.

    Raises:
        CheckpointError: the folder cannot be opened at all (missing, truncated, unknown format).
    """
    packed = PackedCheckpoint.open(path)
    implied, problem = implied_shapes(packed.config)
    problems = [*([problem] if problem else []), *config_problems(packed), *name_problems(packed, source, implied)]
    shapes = _read_weights(packed, problems, implied)
    for name in packed.dense_names():
        problems += dense_problems(packed, name, implied)
        packed.files.release()
    linears = set(packed.dense_linears())
    dense = tuple(_describe_dense(packed, name, linears) for name in packed.dense_names())
    num_quantized = sum(rows * columns for rows, columns in shapes.values())
    return StructureReport(
        path=str(packed.path),
        format=packed.format,
        problems=tuple(problems),
        quantized={module: str(scheme) for module, scheme in packed.schemes.items()},
        dense=dense,
        num_parameters=num_quantized + sum(math.prod(tensor.shape) for tensor in dense),
        num_quantized=num_quantized,
        quantized_bytes=sum(packed.weight_bytes(module) for module in shapes),
        total_bytes=packed.files.file_bytes,
        notes=(*(_carried_note(packed, implied) if implied or problem else (UNCOMPARED,)), *_order_note(packed)),
    )


def _carried_note(packed: PackedCheckpoint, implied: Shapes) -> tuple[str, ...]:
    """Returns a note on tensors outside the layers in config.json, such as multi-token prediction heads."""
    parts = {_part(name) for name in implied}
    others = packed.files.other_parts
    carried = [name for name in _stored(packed) if implied and _part(name) not in parts and name not in others]
    found = f"{len(carried)} tensors are of no layer in config.json: only drafting reads a head among them"
    return (f"{found}, e.g. {min(carried)}",) if carried else ()


def _order_note(packed: PackedCheckpoint) -> tuple[str, ...]:
    """A note on modules in activation order."""
    count = len(packed.reordered)
    return (f"{count} modules have {REORDERED}: compress quantize takes them as its source",) if count else ()


def _part(name: str) -> str:
    """Returns the block of a tensor, `model.layers.3.`, or its own name outside blocks."""
    block = re.match(r".+?\.\d+\.", name)
    return block[0] if block else name


def _stored(packed: PackedCheckpoint) -> set[str]:
    """Returns stored weights by their names in a dense checkpoint, including a tied head."""
    stored = {*packed.dense_names(), *(f"{module}.weight" for module in packed.modules)}
    return stored | {"lm_head.weight"} if packed.tied else stored


def _read_weights(packed: PackedCheckpoint, problems: list[str], implied: Shapes) -> dict[str, tuple[int, int]]:
    """Shapes of the packed modules that can be read; what is wrong with any is added to `problems`."""
    shapes: dict[str, tuple[int, int]] = {}
    for module in packed.modules:
        try:
            weight, _ = packed.in_groups(module)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        shapes[module] = weight.shape
        problems += weight_problems(packed, module, weight, implied)
        packed.files.release()
    return shapes


def config_problems(packed: PackedCheckpoint) -> Iterator[str]:
    """Yields a line per contradiction within config.json."""
    if not packed.config.get("model_type"):
        yield "config.json has no model_type"
    block = quantization_block(packed.config)
    if block and not packed.modules:
        yield "config.json announces quantized weights, but none are stored"
    yield from _kv_cache_problems(packed)
    if packed.format != COMPRESSED_TENSORS.name:
        return
    if block.get("quantization_status") not in (None, "compressed", "frozen"):
        yield f"quantization_status is {block['quantization_status']!r}, not 'compressed'"
    ignored = block.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(entry, str) for entry in ignored):
        yield "quantization_config.ignore is not a list of names"
        return
    patterns = any(entry.startswith("re:") for entry in ignored)
    # A head that shares the embedding is not a separate linear: other tools leave it out of the list.
    linears = {module for module in packed.dense_linears() if f"{module}.weight" in packed.files}
    unlisted = linears - set(ignored)
    if unlisted and not patterns:
        yield f"dense linear layers missing from `ignore`: {', '.join(sorted(unlisted))}"


def _kv_cache_problems(packed: PackedCheckpoint) -> Iterator[str]:
    """Yields problems with the recorded KV cache format, its measurements and those of recurrent states."""
    try:
        scheme, record = stored_kv_cache(packed.config), measured_kv_caches(packed.config)
        measured_states(packed.config)
    except (CheckpointError, SchemeError) as error:
        yield error.problem
        return
    measured = record.find(scheme) if scheme and record else None
    if scheme and record and not scheme.is_exact and not (measured and record.passes(measured)):
        yield f"keys and values default to {scheme}, which was not measured within a mean KL of {record.max_kl:g}"


def parts_of_weights(suffixes: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns ends of names that only tensors of packed weights have: of all forms, and of a format's `suffixes`."""
    known = (*suffixes, *COMPRESS_RUNTIME.suffixes(), ".qweight")
    return tuple(suffix for suffix in known if not suffix.endswith(".weight"))


def name_problems(packed: PackedCheckpoint, source: TensorFiles | None, implied: Shapes) -> Iterator[str]:
    """Yields a line per stored tensor without a role, and per parameter that is not stored exactly once."""
    suffixes = parts_of_weights(packed.codec.suffixes())
    yield from (f"{name} belongs to no quantized module" for name in packed.dense_names() if name.endswith(suffixes))
    for module in packed.modules:
        found = {name.removeprefix(module) for name in packed.packed_names(module)}
        yield from packed.schemes[module].name_problems(module, found)
    stored = _stored(packed)
    yield from (f"{name} is missing" for name in implied if name not in stored)
    if source is not None:
        yield from (f"{name} of the source is missing" for name in source.names() if name not in stored)
        extra = stored - set(source.names()) - {"lm_head.weight"}
        yield from (f"{name} is not in the source" for name in sorted(extra))


def is_only_copied(files: TensorFiles, name: str) -> bool:
    """Returns whether nothing reads a tensor: a buffer of older releases, or a part outside of the text model."""
    return name in files.other_parts or name.endswith(BUFFERS)


def dense_problems(packed: PackedCheckpoint, name: str, implied: Shapes) -> Iterator[str]:
    """Yields a line for NaN, infinity and another shape than config.json implies in one unquantized tensor. Those that
    are only copied may be masks: those of other parts than the text model, and buffers."""
    tensor = packed.tensor(name)
    if not is_only_copied(packed.files, name):
        yield from nonfinite_problems(name, tensor)
    expected = implied.get(name, tuple(tensor.shape))
    if expected != tuple(tensor.shape):
        yield f"{name} is {tuple(tensor.shape)}, but config.json says {expected}"


def _describe_dense(packed: PackedCheckpoint, name: str, linears: Set[str]) -> DenseTensor:
    shape = packed.files.shape(name)
    return DenseTensor(name, shape, packed.files.tensor_nbytes(name), _reason(packed, name, shape, linears))


def _reason(packed: PackedCheckpoint, name: str, shape: tuple[int, ...], linears: Set[str]) -> str:
    """Returns the reason why a tensor stayed dense: from the plan, else derived from its name and shape."""
    module = name.rpartition(".")[0]
    recorded = compression_block(packed.config).get("dense") or {}
    if module in recorded:
        return str(recorded[module])
    if name in packed.files.other_parts:
        return "not of the text model"
    if len(shape) < 2:
        return "norm or bias"
    if module not in linears:
        return "embedding, also the output head (tied)" if packed.tied else "embedding"
    return "dense checkpoint" if not packed.modules else "left out (ignore)"
