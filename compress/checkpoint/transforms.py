"""Matrices that inputs and outputs of linears are multiplied by (`transform_config` of compressed-tensors: QuIP and
SpinQuant), folded into the weights that are read. Other engines multiply activations by them at every token. So does
this runtime where they are all Sylvester's Hadamard matrices at the inputs of integers: these get the form
`RotatedInputs`.

With an input transform `A` and an output transform `B`, a linear computes `y = (x A) W^T B`, which is `x` times the
transposed weight `B^T W A^T`. Both matrices repeat one block along the diagonal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.config import is_embedding, quantization_block
from compress.checkpoint.dequantized import dequantized, dequantized_files
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, RotatedInputs, Scheme
from compress.checkpoint.weights.rotated_inputs import hadamard_matrix, is_order
from compress.common.errors import CheckpointError
from compress.models.config import block
from compress.models.known_keys import refuse_unread

FOLDED = "weight_input", "weight_output"
"""Locations whose transforms the stored weights have already."""
ONLINE = INPUT, OUTPUT = "input", "output"
SCORES = {"q_attn", "k_cache"}
"""Locations of queries and keys: an orthogonal matrix at both changes no attention score."""
HADAMARD = "hadamard", "random-hadamard"
"""Types of matrices of 1 and -1, which are orthogonal up to the root of their order."""
TYPES = *HADAMARD, "random-matrix"
SCHEME_KEYS = "type", "apply", "head_dim", "precision", "requires_grad"
PLACE_KEYS = "targets", "ignore", "location", "inverse"


@dataclass(frozen=True, slots=True)
class Transform:
    """A matrix that other engines multiply inputs or outputs of some linears by.

    Attributes:
        group: its name in config.json.
        type: of the matrix.
        location: `input` or `output`.
        order: of the matrix; None is the number of inputs or outputs.
        inverse: a stored Hadamard matrix is transposed first.
        targets, ignored: names of modules, patterns after `re:`, or `Linear`.
    """

    group: str
    type: str
    location: str
    order: int | None
    inverse: bool
    targets: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def suffix(self) -> str:
        """End of the names of its matrices, one for each order, in the first module that has it."""
        return f".{self.group}_{self.location}.weight"

    def is_of(self, module: str) -> bool:
        """Returns whether a module is transformed."""
        return _is_among(module, self.targets) and not _is_among(module, self.ignored)

    def fold(self, values: Tensor, matrix: Tensor) -> Tensor:
        """Folds the stored matrix into `values [O, I]`, float64."""
        block = matrix.double()
        if self.type in HADAMARD:
            block = (block.T if self.inverse else block) / len(block) ** 0.5
        return _by_blocks(values, block.T) if self.location == INPUT else _by_blocks(values.T, block).T


def _by_blocks(rows: Tensor, block: Tensor) -> Tensor:
    """Multiplies `rows [N, K n]` by a matrix with `block [n, n]` K times along its diagonal."""
    return (torch.unflatten(rows, -1, (-1, len(block))) @ block).flatten(-2)


def _is_among(module: str, names: tuple[str, ...]) -> bool:
    kind = "Embedding" if is_embedding(module) else "Linear"
    patterns = (name.removeprefix("re:") for name in names if name.startswith("re:"))
    return kind in names or module in names or any(re.match(pattern, module) for pattern in patterns)


def online_transforms(config: Mapping[str, Any]) -> list[Transform]:
    """Reads the transforms of a `transform_config` that stored weights do not have and that change what is computed.

    Raises:
        CheckpointError: transforms that are not read here.
    """
    refuse_unread("transform_config", config, ["config_groups"])
    groups = block(config, "config_groups")
    return [transform for group in groups for transform in _read_group(group, block(groups, group))]


def _read_group(group: str, scheme: Mapping[str, Any]) -> Iterator[Transform]:
    refuse_unread(f"transform {group}", scheme, SCHEME_KEYS)
    if scheme.get("type") not in TYPES:
        raise _unknown(group, f"of type {scheme.get('type')}")
    scores = dict[str, Any]()
    for place in scheme.get("apply") or ():
        refuse_unread(f"transform {group}", place, PLACE_KEYS)
        location = place["location"]
        details = bool(place.get("inverse")), _names(place.get("targets")), _names(place.get("ignore"))
        if location in SCORES:
            scores[location] = details
        elif location in ONLINE:
            yield Transform(group, scheme["type"], location, scheme.get("head_dim"), *details)
        elif location not in FOLDED:
            raise _unknown(group, f"of {location}")
    if scores and (scores.keys() != SCORES or len(set(scores.values())) > 1 or scheme["type"] not in HADAMARD):
        raise _unknown(group, f"of {' and '.join(sorted(scores))}")


def _names(names: str | list[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _unknown(group: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"transform_config has a transform {group} {what}, which is not applied here",
        "Quantize the model again without it",
    )


MATRIX = re.compile(r"_(input|output|q_attn|k_cache)\.(weight|perm)$")
"""End of the name of a tensor of a transform."""


def without_transforms(packed: PackedCheckpoint) -> PackedCheckpoint:
    """Returns the dense view of a checkpoint with transforms that its weights do not have, or its packed one where they
    are all rotated inputs; else the checkpoint itself.

    Raises:
        CheckpointError: transforms that are not read here.
    """
    transforms = online_transforms(block(quantization_block(packed.config), "transform_config"))
    if not transforms:
        return packed
    found = {module: matrices for module in _matrices(packed) if (matrices := _find(packed, transforms, module))}
    if (schemes := _rotated(packed, found)) is not None:
        stored = {name: tensor for name, tensor in packed.files.tensors.items() if MATRIX.search(name) is None}
        return replace(packed, schemes=packed.schemes | schemes, files=replace(packed.files, tensors=stored))
    files = dequantized_files(packed)
    kept = {name: tensor for name, tensor in files.tensors.items() if MATRIX.search(name) is None}
    changed = {
        name: replace(tensor, read=partial(_transformed, packed, name, applied, tensor.dtype), place=None, scheme=None)
        for name, tensor in kept.items()
        if (applied := _applied(found, name))
    }
    groups = tuple(sorted({transform.group for each in found.values() for transform, _ in each}))
    inputs = ", so inputs keep 16 bits, where the checkpoint rounds them" if packed.inputs else ""
    note = f"transforms {', '.join(groups)} of transform_config are folded into the weights{inputs}"
    files = replace(files, tensors={**kept, **changed}, notes=(*files.notes, note), folded=groups)
    return replace(dequantized(packed), files=files)


def _rotated(packed: PackedCheckpoint, found: Mapping[str, list[tuple[Transform, str]]]) -> dict[str, Scheme] | None:
    """Returns the forms of modules whose transforms are rotated inputs; None where one has other transforms."""
    schemes = dict[str, Scheme]()
    for module, transforms in found.items():
        scheme, (transform, name), *others = packed.schemes.get(module), *transforms
        order = packed.files.shape(name)[0]
        is_plain = transform.type == HADAMARD[0] and transform.location == INPUT and not others
        if not is_plain or not isinstance(scheme, Int) or module in packed.inputs or not is_order(order):
            return None
        if not torch.equal(packed.tensor(name).double(), hadamard_matrix(order, torch.float64)):
            return None
        schemes[module] = RotatedInputs(scheme, order)
    return schemes


def _applied(found: Mapping[str, list[tuple[Transform, str]]], name: str) -> list[tuple[Transform, str]]:
    """Returns the transforms of a weight or bias, with the names of their matrices."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return []
    return [each for each in found.get(module, ()) if kind == "weight" or each[0].location == OUTPUT]


def _transformed(
    packed: PackedCheckpoint, name: str, applied: list[tuple[Transform, str]], dtype: torch.dtype
) -> Tensor:
    """Reads a weight or bias with its transforms, rounded once."""
    module, _, kind = name.rpartition(".")
    is_packed = kind == "weight" and module in packed.schemes
    stored = packed.values(module, torch.float64) if is_packed else packed.tensor(name)
    values = stored.double().reshape(len(stored), -1)
    for transform, matrix in applied:
        values = transform.fold(values, packed.tensor(matrix))
    return values.reshape(stored.shape).to(dtype)


def _matrices(packed: PackedCheckpoint) -> list[str]:
    """Modules with a matrix."""
    dense = (name for name in packed.dense_names() if name.endswith(".weight") and not MATRIX.search(name))
    return [*packed.modules, *(name.removesuffix(".weight") for name in dense if len(packed.files.shape(name)) == 2)]


def _find(packed: PackedCheckpoint, transforms: list[Transform], module: str) -> list[tuple[Transform, str]]:
    """Returns the transforms of a module, with the names of their matrices.

    Raises:
        CheckpointError: an embedding, two transforms at one location, whose order is not known, or no matrix that fits.
    """
    names, files = packed.files.text_names, packed.files
    found = [each for each in transforms if each.is_of(names.stored(module) if names else module)]
    if found and (is_embedding(module) or len({each.location for each in found}) < len(found)):
        raise _unknown(found[0].group, f"of {module}")
    matrices = []
    for transform in found:
        side = packed.shape(module)[transform.location == INPUT]
        order = transform.order or side
        stored = (name for name in packed.dense_names() if name.endswith(transform.suffix))
        matrix = next((name for name in stored if files.shape(name) == (order, order)), None)
        if matrix is None or side % order:
            raise _unknown(transform.group, f"of {module}, without a matrix of order {order}")
        matrices.append((transform, matrix))
    return matrices
