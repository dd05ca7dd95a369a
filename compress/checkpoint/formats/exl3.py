"""EXL3 as exllamav3 publishes it (`quant_method: exl3`). It is read, not written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, EXLLAMA, RUNTIME, ReadOnly
from compress.checkpoint.safetensors import LazyTensor, TensorFiles
from compress.checkpoint.weights import Exl3, Scheme
from compress.checkpoint.weights.exl3 import WORD_BITS, padded
from compress.models.registry import find_family


def without_padding(files: TensorFiles, config: Mapping[str, Any]) -> TensorFiles:
    """Cuts scales and biases of layers that exllamav3 pads to multiples of 128 to the sides that config.json implies.

    Sides are those of the family's parameters; a model type that no family describes keeps what is stored.
    """
    describe = find_family(config.get("model_type"))
    implied = describe(config).parameters() if describe else {}
    sides = ((name.removesuffix(".weight"), shape) for name, shape in implied.items())
    cuts = (cut for module, shape in sides if f"{module}.trellis" in files for cut in _cuts(module, *shape))
    shorter = {
        name: _cut(files[name], size) for name, stored, size in cuts if name in files and files.shape(name) == (stored,)
    }
    return replace(files, tensors={**files.tensors, **shorter})


def _cut(vector: LazyTensor, size: int) -> LazyTensor:
    """Returns the first elements of a vector."""
    return replace(vector, shape=(size,), nbytes=size * vector.dtype.itemsize, read=lambda: vector.read()[:size])


def _cuts(module: str, rows: int, columns: int) -> Iterator[tuple[str, int, int]]:
    """Vectors of a module: their names, and their sizes with the padding and without it."""
    for suffix, side in ((".suh", columns), (".svh", rows), (".bias", rows)):
        yield module + suffix, padded(side), side
    for suffix, side in ((".su", columns), (".sv", rows)):
        yield module + suffix, padded(side) // WORD_BITS, -(-side // WORD_BITS)


class Exl3Container(ReadOnly):
    """EXL3."""

    name = "exl3"
    engines = RUNTIME, EXLLAMA
    keys = "bits codebook head_bits out_scales tensor_storage"
    stored = Exl3.suffixes

    def modules(self, names: Iterable[str]) -> list[str]:
        return sorted(Exl3.modules(names))

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module, of which only its tensors tell the width and the codebook."""
        return dict[str, Scheme].fromkeys(modules, Exl3())


EXL3 = CONTAINERS.register(order=10)(Exl3Container())
