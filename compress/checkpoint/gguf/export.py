"""Writing a checkpoint as a GGUF file: codes as they are where a type holds them, all else rounded to a type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.config import HEAD
from compress.checkpoint.dequantized import UNUSED_SCALES
from compress.checkpoint.gguf.architectures.base import Architecture, expert_of, interleaved, is_end, is_router
from compress.checkpoint.gguf.exact import exact_blocks, exact_type
from compress.checkpoint.gguf.mixes import TYPES, Mix, Place, find_mix, fitting, number_of
from compress.checkpoint.gguf.model_metadata import architecture_of, model_metadata
from compress.checkpoint.gguf.rounding import round_to
from compress.checkpoint.gguf.tokenizer_metadata import tokenizer_metadata
from compress.checkpoint.gguf.types.base import BLOCK_TYPES
from compress.checkpoint.gguf.types.plain import DTYPES
from compress.checkpoint.gguf.writer import NewTensor, write_gguf
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError, SchemeError
from compress.common.files import check_out_folder

BY_BITS = {2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k"}
NOT_STORED = (*UNUSED_SCALES, ".inv_freq")
"""Ends of names of tensors that follow from others or are measured again."""
QUANTIZATION_VERSION = 2
KEPT = "codes as they are"


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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        matrices = [{"type": name, "values": how, "count": count} for (name, how), count in sorted(self.types.items())]
        return {"path": str(self.path), "matrices": matrices}


def export_gguf(path: str | Path, out: str | Path, mix: str | None = None, embedding: str | None = None) -> GGUFExport:
    """Writes the checkpoint at `path` to the new file `out`.

    Args:
        mix: decides the types of matrices whose codes no type holds, and of dense ones; None keeps these dense, except
            for the embedding and the head of a packed checkpoint.
        embedding: type of the embedding and the head; None for that of the mix, or of the mix of most codes.

    Raises:
        CheckpointError: `path` cannot be read, its model or tokenizer has no form in GGUF, or `out` exists.
        SchemeError: codes that no type holds, without `mix`, or a mix or type that is not written.
    """
    planner = Planner.open(path, mix, embedding)
    target, packed = check_out_folder(out), planner.packed
    planned = list(planner.tensors())
    tensors = [each for each, _ in planned]
    metadata, vectors = model_metadata(packed.config, {tensor.name for tensor in tensors})
    tensors += [_vector(name, values) for name, values in vectors.items()]
    types = Counter((tensor.type.name, how) for tensor, how in planned if len(tensor.shape) > 1)
    general = {"general.name": packed.path.resolve().name, "general.file_type": _file_type(types, planner.mix)}
    metadata |= {**general, "general.quantization_version": QUANTIZATION_VERSION}
    metadata |= tokenizer_metadata(packed.path, packed.config["vocab_size"])
    write_gguf(target, metadata, tensors)
    return GGUFExport(target, types)


def _file_type(types: Counter[tuple[str, str]], mix: Mix | None) -> int:
    """Returns the number of the mix, or of the type of most codes where these are of another."""
    kept, every = Counter[str](), Counter[str]()
    for (name, how), count in types.items():
        every[name] += count
        kept[name] += count * how.startswith(KEPT)
    if mix is not None and (not kept.total() or kept[mix.base]):
        return mix.number
    return number_of((kept if kept.total() else every).most_common(1)[0][0])


def _vector(name: str, values: list[float]) -> NewTensor:
    return NewTensor(name, BLOCK_TYPES["f32"], (len(values),), lambda: torch.tensor(values, dtype=torch.float32))


@dataclass(frozen=True)
class Planner:
    """Chooses the type of every tensor; weights are read to look at their scales, and not kept."""

    packed: PackedCheckpoint
    architecture: Architecture
    mix: Mix | None = None
    embedding: str | None = None

    @classmethod
    def open(cls, path: str | Path, mix: str | None = None, embedding: str | None = None) -> Planner:
        """Opens a checkpoint. Raises the errors of `export_gguf`."""
        if embedding is not None and embedding not in TYPES:
            raise SchemeError.unknown("GGUF type", embedding, TYPES, "Use --embedding-type")
        chosen, packed = None if mix is None else find_mix(mix), PackedCheckpoint.open(path)
        if packed.files.text_names is not None:
            problem = f"{packed.path} is a multimodal model, which GGUF splits into two files"
            raise CheckpointError(problem, "Export it as dense")
        return cls(packed, architecture_of(packed.config), chosen, embedding)

    def tensors(self) -> Iterator[tuple[NewTensor, str]]:
        """Yields what is to be written, and what becomes of the values."""
        names = self.names()
        blocks = list(self._planned((name, own) for name, own in names.items() if not is_end(own)))
        yield from blocks
        kept = Counter(tensor.type.name for tensor, how in blocks if how.startswith(KEPT))
        mix = self.mix or (find_mix(kept.most_common(1)[0][0]) if kept else None)
        yield from replace(self, mix=mix)._planned((name, own) for name, own in names.items() if is_end(own))

    def names(self) -> dict[str, str]:
        """Returns the names in files of all tensors. Raises CheckpointError for one that has no place there."""
        packed, found = self.packed, dict[str, str]()
        names = [*(f"{module}.weight" for module in packed.modules), *packed.dense_names()]
        for name in sorted(name for name in names if not name.endswith(NOT_STORED)):
            if name == f"{HEAD}.weight" and self._is_tied():
                continue
            own = self.architecture.file_name(name)
            if own is None:
                problem = f"{name} has no place in GGUF files of {self.architecture.name!r}"
                raise CheckpointError(problem, "Export it as dense")
            found[name] = own
        return found

    def chosen_types(self) -> dict[str, str]:
        """Returns the types that the mix gives the matrices of the layers, by module, without routers."""
        found = dict[str, str]()
        for name, own in self.names().items():
            module = name.removesuffix(".weight")
            shape = self.packed.shape(module) if module in self.packed.schemes else self.packed.files.shape(name)
            kind = self._type_of(own, shape)
            if kind is not None and len(shape) == 2 and not is_end(own) and not is_router(own):
                found[module] = kind
        return found

    def _is_tied(self) -> bool:
        return self.packed.tied and HEAD not in self.packed.schemes

    def _planned(self, names: Iterable[tuple[str, str]]) -> Iterator[tuple[NewTensor, str]]:
        packed, stacks = self.packed, dict[str, dict[int, tuple[NewTensor, str]]]()
        for name, own in names:
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
        if exact is not None and (self.embedding in (None, exact) or not is_end(own)):
            how = KEPT + ("" if codes is None or codes.is_symmetric else ", minima rounded to float16")
            return self._new(own, exact, shape, lambda: self._exact_blocks(module, exact)), how
        kind = self._type_of(own, shape)
        if kind is None:
            scheme = self.packed.schemes[module]
            nearest = BY_BITS.get(ceil(scheme.bits), "q8_0")
            problem = f"{module}: no type of GGUF holds {scheme} with its scales"
            raise SchemeError(problem, f"Round its values again: --gguf-type {nearest}")
        return self._rounded(own, kind, shape, lambda: self.packed.values(module, torch.float32))

    def _codes(self, module: str) -> CodedWeight | None:
        if self.packed.column_order(module) is not None:
            return None
        weight = self.packed.weight(module)
        return weight if isinstance(weight, CodedWeight) else None

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
        kind = self._type_of(own, shape)
        if kind is not None:
            return self._rounded(own, kind, shape, lambda: packed.tensor(name))
        found = {dtype: name for name, dtype in DTYPES.items()}.get(packed.files.dtype(name), "f32")
        stored = "f32" if found == "f64" else found
        return self._new(own, stored, shape, lambda: round_to(packed.tensor(name), stored)), "dense"

    def _rounded(
        self, own: str, kind: str, shape: tuple[int, ...], values: Callable[[], Tensor]
    ) -> tuple[NewTensor, str]:
        return self._new(own, kind, shape, lambda: round_to(values(), kind)), "rounded"

    def _type_of(self, own: str, shape: tuple[int, ...]) -> str | None:
        """Returns the type to round a matrix to, by its name in files; None for one that stays dense."""
        if self.embedding is not None and is_end(own):
            return fitting(self.embedding, shape[-1])
        if self.mix is None:
            return None
        *block, kind, _ = own.split(".")
        heads, config = self._heads(), self.packed.config
        place = Place(
            kind,
            columns=shape[-1],
            layer=int(block[1]) if block else 0,
            layers=config["num_hidden_layers"],
            groups=heads["num_attention_heads"] // heads["num_key_value_heads"],
            experts=config.get("num_local_experts") or config.get("num_experts") or 0,
            is_tied=self._is_tied(),
        )
        return self.mix.type_of(place)

    def _new(self, own: str, kind: str, shape: tuple[int, ...], blocks: Callable[[], Tensor]) -> NewTensor:
        heads = self.architecture.heads_of(own, self._heads())
        if heads is None:
            return NewTensor(own, BLOCK_TYPES[kind], tuple(shape), blocks)
        return NewTensor(own, BLOCK_TYPES[kind], tuple(shape), lambda: interleaved(blocks(), heads))

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
