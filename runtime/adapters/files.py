"""Reads the adapters that PEFT writes: `adapter_model.safetensors` with two factors for each adapted module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.safetensors import LazyTensor, MappedFile
from compress.common.errors import CheckpointError
from runtime.adapters.config import LoraConfig
from runtime.adapters.targets import ExpertStack, Targets
from runtime.backends.adapted_linear import Factors
from runtime.core.adapter import CONFIG

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX, INNER = "base_model.model.", ".base_layer"
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoraAdapter:
    """An adapter in host memory.

    Attributes:
        digest: SHA-256 of configuration and weights.
        factors: by modules of the checkpoint.
    """

    name: str
    digest: str
    factors: Mapping[str, Factors]


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters of one model.

    Attributes:
        dtype: of activations.
        max_rank: highest rank that is read.
    """

    targets: Targets
    dtype: torch.dtype
    max_rank: int

    def read(self, name: str, folder: Path) -> LoraAdapter:
        """Reads and checks the adapter of a folder.

        Raises:
            CheckpointError: the folder holds none, it is refused (see `LoraConfig.read`), or does not fit the model.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder", "Name the folder that PEFT's save_pretrained wrote")
        config, path = LoraConfig.read(folder), folder / WEIGHTS
        if not path.is_file():
            remedy = "Load it with PEFT and save it again: save_pretrained(FOLDER) writes safetensors"
            other = f"; {PICKLED} is a pickle, which could run code" if (folder / PICKLED).exists() else ""
            raise CheckpointError(f"{folder} holds no {WEIGHTS}{other}", remedy)
        pairs = _pairs(path, MappedFile.open(path).entries)
        digest = sha256((folder / CONFIG).read_bytes() + path.read_bytes()).hexdigest()
        factors: dict[str, Factors] = {}
        for module, pair in pairs.items():
            for target, found in self._read(path, config, module, pair):
                if target in factors:
                    raise CheckpointError(f"{path} adapts {target} twice", "Save it again")
                factors[target] = found
        if not factors:
            raise CheckpointError(f"{path} adapts nothing", "Save it again")
        return LoraAdapter(name, digest, factors)

    def _read(
        self, path: Path, config: LoraConfig, name: str, pair: tuple[LazyTensor, LazyTensor]
    ) -> Iterator[tuple[str, Factors]]:
        """Yields the factors of a module of PEFT by modules of the checkpoint."""
        plain = name.replace(INNER, "")
        if module := self.targets.module_of(plain):
            shape, rank = self.targets.modules[module], config.rank_of(plain)
            self._check(path, name, pair, shape, rank, rank)
            down, up = self._scaled(pair, config.scale_of(plain))
            yield module, Factors(down, up)
            return
        for stack in self.targets.stacks_of(plain):
            if stack.shape == (pair[1].shape[0], pair[0].shape[-1]):
                yield from self._read_stack(path, config, name, pair, stack)
                return
        if self.targets.stacks_of(plain):
            raise CheckpointError(f"{path}: {name} has factors of shapes {_shapes(pair)}, which no expert has", REMEDY)
        last = sorted({each.rpartition(".")[2] for each in self.targets.modules})
        raise CheckpointError(
            f"{path} adapts {name}, which this model does not have, or whose weight is not adapted here",
            f"Train it for some of {', '.join(last)}",
        )

    def _read_stack(
        self, path: Path, config: LoraConfig, name: str, pair: tuple[LazyTensor, LazyTensor], stack: ExpertStack
    ) -> Iterator[tuple[str, Factors]]:
        """Yields the factors of all experts: `[E * r, I]`, and `[O, r * E]` with the experts of each rank in turn."""
        parameter, count = f"{name.replace(INNER, '')}.{stack.name}", stack.num_experts
        rank = config.rank_of(parameter)
        self._check(path, name, pair, stack.shape, rank * count, rank)
        down, up = self._scaled(pair, config.scale_of(parameter))
        downs, ups = down.unflatten(0, (count, rank)), up.unflatten(1, (rank, count))
        for part in stack.parts:
            yield part.module, Factors(downs[part.expert].clone(), ups[part.rows, :, part.expert].contiguous())

    def _check(
        self,
        path: Path,
        name: str,
        pair: tuple[LazyTensor, LazyTensor],
        shape: tuple[int, int],
        rows: int,
        rank: int,
    ) -> None:
        """Raises CheckpointError unless two factors of a rank fit a weight `[O, I]`."""
        wanted = (rows, shape[1]), (shape[0], rows)
        if (pair[0].shape, pair[1].shape) != wanted:
            problem = f"{path}: {name} has factors of shapes {_shapes(pair)}, and its module needs {_listed(wanted)}"
            raise CheckpointError(problem, REMEDY)
        if rank > self.max_rank:
            problem = f"{path}: {name} has rank {rank}, above --max-lora-rank {self.max_rank}"
            raise CheckpointError(problem, f"Allow it: --max-lora-rank {rank}")

    def _scaled(self, pair: tuple[LazyTensor, LazyTensor], scale: float) -> tuple[Tensor, Tensor]:
        down, up = pair[0].read(), pair[1].read()
        wide = torch.promote_types(torch.promote_types(self.dtype, up.dtype), torch.float32)
        # A copy: what is read is a view of the file, which may change.
        return down.to(self.dtype, copy=True), (up.to(wide) * scale).to(self.dtype)


REMEDY = "Use the model that it was trained for"


def _pairs(path: Path, entries: Mapping[str, LazyTensor]) -> dict[str, tuple[LazyTensor, LazyTensor]]:
    """Returns the factors of each module by its name without PEFT's prefix."""
    names: dict[str, None] = {}
    for entry in entries:
        suffix = next((each for each in SUFFIXES if entry.endswith(each)), None)
        if suffix is None or not entry.startswith(PREFIX):
            raise CheckpointError(f"{path} holds {entry!r}, which is not a factor of a LoRA adapter", REMEDY)
        names[entry.removesuffix(suffix)] = None
    for name in names:
        for suffix in SUFFIXES:
            if name + suffix not in entries:
                raise CheckpointError(f"{path} lacks {name + suffix}", "Save it again")
    return {name.removeprefix(PREFIX): (entries[name + SUFFIXES[0]], entries[name + SUFFIXES[1]]) for name in names}


def _shapes(pair: tuple[LazyTensor, LazyTensor]) -> str:
    return _listed((pair[0].shape, pair[1].shape))


def _listed(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
