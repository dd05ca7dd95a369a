"""EXL3 as exllamav3 publishes it (`quant_method: exl3`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.checkpoint.config import HEAD
from compress.checkpoint.formats.base import CONTAINERS, EXLLAMA, RUNTIME, Container
from compress.checkpoint.safetensors import LazyTensor, TensorFiles
from compress.checkpoint.scheme import FLOAT_BITS
from compress.checkpoint.weights import Exl3, Scheme
from compress.checkpoint.weights.exl3 import WORD_BITS, padded
from compress.common.errors import SchemeError
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


LAYOUT_VERSION = "1.6.5"
"""The version of exllamav3 whose loader reads this layout. It goes by the names of tensors and reads none of the keys
of `quantization_config`, which tell people and other tools about the checkpoint."""
MAX_HALVES = 3.5
"""The widest rate of half bits that it reads."""
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class Exl3Container(Container):
    """EXL3."""

    name = "exl3"
    engines = RUNTIME, EXLLAMA
    keys = "bits codebook head_bits mtp_bits original_quantization_config out_scales tensor_storage vision_bits"
    stored = Exl3.suffixes

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        if not isinstance(scheme, Exl3):
            raise SchemeError(f"exl3 holds trellis codes only, not {scheme}", "Use --method trellis, or another format")
        if scheme.pair_bits % 2 and scheme.bits > MAX_HALVES:
            problem = f"exllamav3 reads half bits up to {MAX_HALVES}, not {scheme}"
            raise SchemeError(problem, "Use whole bits, or keep this checkpoint's format")

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """Returns the mean width of the layers and that of the head; tensors tell the width and the codebook of each.

        Raises:
            SchemeError: experts of a layer differ, which exllamav3 multiplies together.
        """
        _check_experts(schemes)
        widths = [scheme.bits for module, scheme in schemes.items() if module != HEAD]
        codebooks = {scheme.codebook for scheme in schemes.values() if isinstance(scheme, Exl3)}
        return {
            "quant_method": self.name,
            "version": LAYOUT_VERSION,
            "bits": round(fmean(widths or [FLOAT_BITS]), 2),
            "head_bits": schemes[HEAD].bits if HEAD in schemes else FLOAT_BITS,
            "out_scales": "always",
            "codebook": min(codebooks, default="mul1"),
        }

    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the stored tensors, with scales of zero for the padding of the sides."""
        stored = super().encode(module, weight, dtype)
        scales = {f"{module}{suffix}": stored[f"{module}{suffix}"] for suffix in (".suh", ".svh")}
        return stored | {name: _padded(scale) for name, scale in scales.items()}

    def encode_bias(self, bias: Tensor) -> Tensor:
        """Returns a bias with zeros for the padding of its side."""
        return _padded(bias)

    def modules(self, names: Iterable[str]) -> list[str]:
        return sorted(Exl3.modules(names))

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module, of which only its tensors tell the width and the codebook."""
        return dict[str, Scheme].fromkeys(modules, Exl3())


def _padded(vector: Tensor) -> Tensor:
    return pad(vector, (0, padded(len(vector)) - len(vector)))


def _check_experts(schemes: Mapping[str, Scheme]) -> None:
    """Raises SchemeError where a matrix has another width or codebook in one expert of a layer than in the others."""
    found: dict[str, Scheme] = {}
    for module, scheme in schemes.items():
        if _EXPERT.search(module):
            matrix = _EXPERT.sub("*", module)
            if found.setdefault(matrix, scheme) != scheme:
                problem = f"exllamav3 needs one width and codebook for {matrix}, not {found[matrix]} and {scheme}"
                raise SchemeError(
                    problem, "Give all experts of a layer the same bits, or keep this checkpoint's format"
                )


EXL3 = CONTAINERS.register(order=8)(Exl3Container())
