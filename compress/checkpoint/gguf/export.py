"""Writing a checkpoint as a GGUF file: codes as they are where a type holds them, all else rounded to a type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.config import HEAD, is_embedding
from compress.checkpoint.dequantized import UNUSED_SCALES
from compress.checkpoint.gguf.architectures.base import Architecture, expert_of, interleaved, is_router
from compress.checkpoint.gguf.exact import Exact, exact_blocks, exact_type
from compress.checkpoint.gguf.model_metadata import architecture_of, model_metadata
from compress.checkpoint.gguf.rounding import ROUNDERS, round_to
from compress.checkpoint.gguf.tokenizer_metadata import tokenizer_metadata
from compress.checkpoint.gguf.types import BY_NAME
from compress.checkpoint.gguf.types.plain import DTYPES
from compress.checkpoint.gguf.writer import NewTensor, write_gguf
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.common.files import check_out_folder

GGUF_TYPES = tuple(ROUNDERS)
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12}
FILE_TYPES |= {"q4_k": 15, "q5_k": 17, "q6_k": 18, "iq4_nl": 25, "bf16": 32}
"""Numbers of `general.file_type`, which says the type of most tensors."""
BY_BITS = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k"}
NOT_STORED = (*UNUSED_SCALES, ".inv_freq")
"""Ends of names of tensors that follow from others or are measured anew."""
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GGUFExport:
    """A file that was written.

    Attributes:
        types: numbers of matrices by type and by what became of their values.
    """

    path: Path
    types: Counter[tuple[str, str]]

    def lines(self) -> Iterator[str]:
        """Yields a line for every type of matrices."""
        for (name, how), count in sorted(self.types.items()):
            yield f"{count} x {name}: {how}"


def export_gguf(path: str | Path, out: str | Path, kind: str | None = None) -> GGUFExport:
    """Writes the checkpoint at `path` to the new file `out`.

    Args:
        kind: type of matrices whose codes no type holds, and of dense ones; None keeps these dense.

    Raises:
        CheckpointError: `path` cannot be read, its model or tokenizer has no form in GGUF, or `out` exists.
        SchemeError: codes that no type holds, without `kind`, or a `kind` that is not written.
    """
    if kind is not None and kind not in GGUF_TYPES:
        raise SchemeError(f"{kind!r} is no type that is written", f"Choose one of {', '.join(GGUF_TYPES)}")
    target, packed = check_out_folder(out), PackedCheckpoint.open(path)
    if packed.files.text_names is not None:
        raise CheckpointError(f"{packed.path} is a multimodal model, of which GGUF has two files", "Export it as dense")
    planner = Planner(packed, architecture_of(packed.config), kind)
    planned = list(planner.tensors())
    tensors = [each for each, _ in planned]
    metadata, vectors = model_metadata(packed.config, {tensor.name for tensor in tensors})
    tensors += [_vector(name, values) for name, values in vectors.items()]
    types = Counter((tensor.type.name, how) for tensor, how in planned if len(tensor.shape) > 1)
    file_type = FILE_TYPES[types.most_common(1)[0][0][0]]
    general = {"general.name": packed.path.resolve().name, "general.file_type": file_type}
    metadata |= {**general, "general.quantization_version": QUANTIZATION_VERSION}
    metadata |= tokenizer_metadata(packed.path, packed.config["vocab_size"])
    write_gguf(target, metadata, tensors)
    return GGUFExport(target, types)


def _vector(name: str, values: list[float]) -> NewTensor:
    return NewTensor(name, BY_NAME["f32"], (len(values),), lambda: torch.tensor(values, dtype=torch.float32))


@dataclass(frozen=True)
class Planner:
    """Chooses the type of every tensor; weights are read to look at their scales, and not kept."""

    packed: PackedCheckpoint
    architecture: Architecture
    kind: str | None

    def tensors(self) -> Iterator[tuple[NewTensor, str]]:
        """Yields what is to be written, and what becomes of the values."""
        packed = self.packed
        names = [*(f"{module}.weight" for module in packed.modules), *packed.dense_names()]
        stacks: dict[str, dict[int, tuple[NewTensor, str]]] = {}
        for name in sorted(name for name in names if not name.endswith(NOT_STORED)):
            if name == f"{HEAD}.weight" and packed.tied and HEAD not in packed.schemes:
                continue
            own = self.architecture.file_name(name)
            if own is None:
                problem = f"{name} has no place in GGUF files of {self.architecture.name!r}"
                raise CheckpointError(problem, "Export it as dense")
            is_packed, expert = name.removesuffix(".weight") in packed.schemes, expert_of(name)
            planned = self._packed(name, own) if is_packed else self._dense(name, own)
            if expert is None:
                yield planned
            else:
                stacks.setdefault(own, {})[expert] = planned
            packed.files.release()
        for own, experts in stacks.items():
            yield stack_experts(own, experts)

    def _packed(self, name: str, own: str) -> tuple[NewTensor, str]:
        module = name.removesuffix(".weight")
        shape, codes = self.packed.shape(module), self._codes(module)
        exact = None if codes is None else exact_type(codes)
        if exact is not None:
            how = "codes as they are" + ("" if codes is None or codes.is_symmetric else ", minima rounded to float16")
            return self._new(own, exact, shape, lambda: self._exact_blocks(module, exact)), how
        if self.kind is None:
            scheme = self.packed.schemes[module]
            nearest = BY_BITS.get(scheme.bits, "q8_0")
            problem = f"{module}: no type of GGUF holds {scheme} with its scales"
            raise SchemeError(problem, f"Round its values again: --gguf-type {nearest}")
        return self._rounded(name, own, shape, lambda: self.packed.values(module, torch.float32))

    def _codes(self, module: str) -> Exact | None:
        if self.packed.column_order(module) is not None:
            return None
        weight = self.packed.weight(module)
        return weight if isinstance(weight, Exact) else None

    def _exact_blocks(self, module: str, exact: str) -> Tensor:
        codes = self._codes(module)
        if codes is None:
            raise CheckpointError(f"{module} has changed while it was written", "Run the same command again")
        return exact_blocks(codes, exact)

    def _dense(self, name: str, own: str) -> tuple[NewTensor, str]:
        packed, shape = self.packed, self.packed.files.shape(name)
        if is_router(own):
            return self._new(own, "f32", shape, lambda: packed.tensor(name).to(torch.float32)), "dense"
        if len(shape) == 1:
            offset = self.architecture.norm_offset if self.architecture.is_offset(own) else 0.0
            return self._new(own, "f32", shape, lambda: packed.tensor(name).to(torch.float32) + offset), ""
        if self.kind is None:
            found = {dtype: kind for kind, dtype in DTYPES.items()}.get(packed.files.dtype(name), "f32")
            kind = "f32" if found == "f64" else found
            return self._new(own, kind, shape, lambda: round_to(packed.tensor(name), kind)), "dense"
        return self._rounded(name, own, shape, lambda: packed.tensor(name))

    def _rounded(
        self, name: str, own: str, shape: tuple[int, ...], values: Callable[[], Tensor]
    ) -> tuple[NewTensor, str]:
        kind = self._type_of(name, shape[-1])
        return self._new(own, kind, shape, lambda: round_to(values(), kind)), "rounded"

    def _type_of(self, name: str, columns: int) -> str:
        """Chooses the type of a matrix: output heads get more bits, rows that are no whole blocks a smaller block."""
        wanted, module = self.kind or "f16", name.removesuffix(".weight")
        is_head = module == HEAD or (is_embedding(module) and self.packed.tied)
        candidates = [*(["q6_k"] if is_head and wanted != "q8_0" else []), wanted, "q8_0", "f16"]
        return next(each for each in candidates if columns % BY_NAME[each].size == 0)

    def _new(self, own: str, kind: str, shape: tuple[int, ...], blocks: Callable[[], Tensor]) -> NewTensor:
        heads = self.architecture.heads_of(own, self._heads())
        if heads is None:
            return NewTensor(own, BY_NAME[kind], tuple(shape), blocks)
        return NewTensor(own, BY_NAME[kind], tuple(shape), lambda: interleaved(blocks(), heads))

    def _heads(self) -> dict[str, int]:
        heads = self.packed.config["num_attention_heads"]
        return {"num_key_value_heads": heads, **self.packed.config, "num_attention_heads": heads}


def stack_experts(name: str, experts: Mapping[int, tuple[NewTensor, str]]) -> tuple[NewTensor, str]:
    """Plans one tensor of the tensors of all experts, by their numbers.

    Raises:
        CheckpointError: an expert is missing.
        SchemeError: experts of several types.
    """
    if sorted(experts) != list(range(len(experts))):
        raise CheckpointError(f"{name}: the checkpoint has no tensor of some experts", "Check it with compress verify")
    parts = [experts[number] for number in range(len(experts))]
    first, types = parts[0][0], sorted({tensor.type.name for tensor, _ in parts})
    if len(types) > 1:
        problem = f"{name} holds all experts in one type, and theirs are {' and '.join(types)}"
        raise SchemeError(problem, "Give the experts of a layer equal bits, or export as dense and that as --gguf-type")
    how = " and ".join(sorted({how for _, how in parts}))
    shape = (len(parts), *first.shape)
    return NewTensor(name, first.type, shape, lambda: torch.stack([tensor.blocks() for tensor, _ in parts])), how
