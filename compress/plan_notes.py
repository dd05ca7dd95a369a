"""Smoothing mappings that a plan can use, and notes on the plan."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from compress.checkpoint.config import is_embedding, read_config
from compress.checkpoint.formats import format_for
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.readers import described, input_notes, readers
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Scheme
from compress.models.architecture import SmoothingMapping
from compress.pipeline.skeleton import Skeleton
from compress.plan import LayerPlan, PlanRow
from compress.targets import without_indices


def usable_mappings(
    skeleton: Skeleton, layer_plans: Mapping[str, LayerPlan]
) -> tuple[tuple[tuple[SmoothingMapping, ...], ...], list[str]]:
    """Mappings in use per block, and a note on every kind of mapping that is not."""
    used: list[tuple[SmoothingMapping, ...]] = []
    unused: dict[SmoothingMapping, int] = {}
    smoothing = sorted({each.method.name for each in layer_plans.values() if each.method and each.method.smooths})
    for index, block in enumerate(skeleton.blocks):
        linears = skeleton.linears(block)
        present = skeleton.architecture.mappings_of(linears.keys())
        name = skeleton.block_name(index)
        used.append(tuple(each for each in present if _mapping_fits(name, linears, each, layer_plans)))
        for mapping in present:
            if mapping not in used[-1]:
                unused[mapping] = unused.get(mapping, 0) + 1
    notes = _unused_notes(unused, skeleton.num_blocks, smoothing) if smoothing else []
    if smoothing and not skeleton.architecture.mappings:
        notes.append(
            f"model type {skeleton.model.config.model_type!r} has no known smoothing mappings: "
            f"{' and '.join(smoothing)} smooth nothing"
        )
    return tuple(used), notes


def _unused_notes(unused: Mapping[SmoothingMapping, int], num_blocks: int, smoothing: Sequence[str]) -> list[str]:
    """Return one note for mappings that differ in nothing but the number of an expert."""
    kinds: dict[str, int] = {}
    for mapping, count in unused.items():
        targets = ", ".join(dict.fromkeys(map(without_indices, mapping.balance_layers)))
        kinds[f"{without_indices(mapping.smooth_layer)} -> {targets}"] = count
    return [
        f"{kind} is not smoothed in {count} of {num_blocks} blocks: not all of them are quantized by "
        f"{' or '.join(smoothing)} with one scheme"
        for kind, count in kinds.items()
    ]


def _mapping_fits(
    block: str, linears: Collection[str], mapping: SmoothingMapping, layer_plans: Mapping[str, LayerPlan]
) -> bool:
    targets = [layer_plans.get(f"{block}.{name}") for name in mapping.balance_layers]
    source = f"{block}.{mapping.smooth_layer}"
    is_linear = mapping.smooth_layer in linears
    method = targets[0].method if targets[0] else None
    same = method is not None and method.smooths and len(set(targets)) == 1
    return same and (not is_linear or source in layer_plans)


CARRIED = "of no layer in config.json: carried along unchanged"
OTHER_PART = "copied untouched"
"""Reason in the plan for tensors that the model does not run."""

ROUTER = "router, gate or index weights: a rounded one chooses other experts or tokens, or another share of a state"
"""Reason in the plan for linears that choose or weigh experts."""


def carried_notes(files: TensorFiles, carried: Sequence[str], num_blocks: int) -> list[str]:
    """Return a note on tensors that the model does not run: other engines may look for them."""
    others = files.other_parts
    towers, left = [name for name in carried if name in others], [name for name in carried if name not in others]
    notes = []
    if towers:
        notes.append(f"{_amount(files, towers)} are of the parts for images and sound: {OTHER_PART}")
    if left:
        notes.append(
            f"{_amount(files, left)} are of no layer in config.json, which has {num_blocks}: multi-token prediction or "
            "left over, carried along unchanged"
        )
    return notes


def _amount(files: TensorFiles, names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({sum(map(files.tensor_nbytes, names)) / 1e6:,.2f} MB, e.g. {names[0]})"


def class_notes(skeleton: Skeleton, layer_plans: Mapping[str, LayerPlan]) -> list[str]:
    """Returns a note on linears whose class, or whose owner, may read the weight that a packed linear has not."""
    linears = skeleton.all_linears()
    packed = [name for name, each in layer_plans.items() if each.scheme and name in linears]
    classes = {type(linears[name]).__name__ for name in packed} - {"Linear"}
    code = Path(str(sys.modules[type(skeleton.model).__module__].__file__)).read_text(encoding="utf-8")
    read = {name.rpartition(".")[2] for name in packed} & set(re.findall(r"\.(\w+)\.weight\b", code))
    found = [f"linears of the class {name}" for name in sorted(classes)]
    found += [f"transformers' code around {', '.join(sorted(read))}"] if read else []
    return [
        f"{each} may read a weight, which packed linears do not have, and then transformers cannot run them packed: "
        "use `compress export --format dense` for it"
        for each in found
    ]


def loader_notes(files: TensorFiles, layer_plans: Mapping[str, LayerPlan]) -> list[str]:
    """Returns a note on the engines that load the checkpoint, as measured, and on those that round inputs unasked."""
    schemes = {module: each.scheme for module, each in layer_plans.items() if each.scheme}
    if not schemes:
        return []
    config = read_config(files.path)
    found = readers(format_for(schemes).name, config, schemes.values())
    notes = ["; ".join(f"{does} {engines}" for does, engines in described(found).items())]
    dense_readers = {each.engine for each in readers(DENSE.name, config, ()) if each.loads}
    if helped := sorted(dense_readers & {each.engine for each in found if each.loads is False}):
        notes.append(f"give {' and '.join(helped)} what `compress export --format dense` writes")
    return [*notes, *input_notes(schemes.values())]


def sibling_notes(skeleton: Skeleton, layer_plans: Mapping[str, LayerPlan]) -> list[str]:
    """Warns of fused projections that would differ in scheme."""
    notes = []
    kinds: dict[str, dict[str, None]] = {}
    for index, module in enumerate(skeleton.blocks):
        block, linears = skeleton.block_name(index), skeleton.linears(module).keys()
        for siblings in skeleton.architecture.siblings + skeleton.architecture.experts:
            if linears >= {*siblings} and len({_scheme_of(layer_plans, f"{block}.{name}") for name in siblings}) > 1:
                kinds.setdefault(", ".join(dict.fromkeys(map(without_indices, siblings))), {})[block] = None
    for kind, differing in kinds.items():
        notes.append(
            f"{kind} differ in scheme in {len(differing)} blocks (e.g. {next(iter(differing))}): engines "
            "that fuse them (vLLM, SGLang) will refuse the checkpoint"
        )
    return notes


def _scheme_of(layer_plans: Mapping[str, LayerPlan], module: str) -> Scheme | None:
    """Return the scheme without ranks, which siblings of other shapes do not share."""
    layer_plan = layer_plans.get(module)
    if layer_plan and layer_plan.factoring and layer_plan.scheme:
        return layer_plan.scheme.codes
    return layer_plan.scheme if layer_plan else None


def scheme_notes(layer_plans: Mapping[str, LayerPlan]) -> list[str]:
    """Return notes on forms that only this runtime reads, and on those that some engines do not load."""
    schemes = {each.scheme for each in layer_plans.values() if each.scheme}
    notes = sorted({scheme.note for scheme in schemes} - {""}, reverse=True)
    if any(is_embedding(module) for module in layer_plans):
        notes.append(
            "the packed embedding is looked up by this runtime only; others read `compress export --format "
            "compressed-tensors`, where it is 16 bits again"
        )
    if any(not scheme.symmetric for scheme in schemes):
        notes.append("asymmetric codes: transformers loads them only with CompressedTensorsConfig(dequantize=True)")
    if odd := sorted({scheme.bits for scheme in schemes if scheme.codes and not scheme.codes.structure} - {4, 8}):
        notes.append(f"{', '.join(map(str, odd))}-bit codes: vLLM and this runtime load them, SGLang only 4 and 8 bits")
    return notes


def larger_notes(rows: Iterable[PlanRow]) -> list[str]:
    """Returns a note on tensors that get no smaller.

    Biases and norms are not weights: only rows with a scheme are expected to shrink.
    """
    larger = [row for row in rows if row.layer_plan and row.layer_plan.scheme and row.bytes_after >= row.bytes_before]
    if not larger:
        return []
    worst = max(larger, key=lambda row: row.bytes_after / row.bytes_before)
    return [
        f"{len(larger)} tensors would get no smaller (e.g. {worst.tensor}: {worst.bytes_before:,} bytes before, "
        f"{worst.bytes_after:,} after as {worst.layer_plan}): use fewer bits, larger groups or fewer outlier columns, "
        "or leave them out"
    ]
