"""Config against tensor headers: layers, vocabulary, output head and dtypes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from compress.checkpoint.config import HEAD, dtype_name
from compress.checkpoint.dequantized import UNUSED_SCALES
from compress.checkpoint.reader import PackedCheckpoint, stores_other_head
from compress.checkpoint.verify import BUFFERS, config_problems, name_problems
from compress.common.errors import UnsupportedModelError
from compress.doctor.base import AGAIN, CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import listed

EXTRA_LAYERS = re.compile(r"nextn|mtp", re.IGNORECASE)
"""Keys of config.json with the number of layers beyond num_hidden_layers."""
BOTH = "Take config.json and the weights from one revision of one model"


@CHECKS.register()
class Config(Check):
    """Compares config.json with the names, shapes and dtypes in headers."""

    name: ClassVar[str] = "config"

    def start(self) -> Iterator[Finding]:
        packed = self.view.packed
        if packed is None:
            return
        for problem in config_problems(packed):
            yield self._impossible(problem)
        if isinstance(refusal := self.view.model_refusal, UnsupportedModelError):
            yield self.warning("unsupported-model", "config.json", refusal.problem, refusal.remedy)
        elif refusal is not None:
            yield self._impossible(refusal.problem)
        yield from self._names(packed)
        yield from self._layers(packed)
        yield from self._head(packed)
        yield from self._vocabulary(packed)
        yield from self._dtype(packed)

    def _impossible(self, problem: str) -> Finding:
        return self.error("config", "config.json", problem, "Correct config.json, or download it again")

    def _names(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        missing = []
        for problem in name_problems(packed, None, self.view.implied):
            name, _, rest = problem.partition(" is missing")
            if rest == "" and name != problem:
                missing.append(name)
            else:
                yield self.error("names", problem.partition(" ")[0], problem, AGAIN)
        if missing:
            problem = f"{len(missing)} tensors that config.json implies are not stored: {listed(missing)}"
            yield self.error("missing-tensors", missing[0], problem, BOTH)
        yield from self._unexpected(packed)

    def _unexpected(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        """Reports tensors in a layer of the model whose name is not a parameter of its family."""
        implied = self.view.implied
        modules = {name.rpartition(".")[0] for name in implied}
        layers = {_layer(name) for name in implied} - {None}
        stored = [*packed.dense_names(), *(f"{module}.weight" for module in packed.modules)]
        found = [
            name
            for name in stored
            if _layer(name) in layers and name not in implied and name.rpartition(".")[0] not in modules
        ]
        known = *BUFFERS, *UNUSED_SCALES
        found = [name for name in found if not name.endswith(known) and name not in packed.files.other_parts]
        if found:
            problem = f"{len(found)} stored tensors are not parameters of the model: {listed(sorted(found))}"
            yield self.warning("unexpected-tensors", min(found), problem, BOTH)

    def _layers(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        announced = packed.config.get("num_hidden_layers")
        counts: Counter[str] = Counter()
        for stack, index in filter(None, map(_layer, packed.files.names())):
            counts[stack] = max(counts[stack], index + 1)
        stored = counts.get("model.layers") or max(counts.values(), default=0)
        if not isinstance(announced, int) or not stored or stored == announced:
            return
        problem = f"num_hidden_layers is {announced}, but tensors of {stored} layers are stored"
        if stored < announced:
            yield self.error("layer-count", "config.json", problem, BOTH)
        elif not any(EXTRA_LAYERS.search(key) and value for key, value in packed.config.items()):
            yield self.warning("layer-count", "config.json", problem, BOTH)

    def _head(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        if packed.config.get("tie_word_embeddings") and stores_other_head(packed.files):
            problem = "tie_word_embeddings is true, but the stored head differs from the embedding, and is used"
            yield self.warning("tied-head", f"{HEAD}.weight", problem, "Set tie_word_embeddings to false")

    def _vocabulary(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        rows, size = self.view.embedding_rows, packed.config.get("vocab_size")
        if rows is not None and isinstance(size, int) and rows != size:
            problem = f"vocab_size is {size}, but the embedding has {rows} rows"
            yield self.error("vocabulary-size", "config.json", problem, f"Set vocab_size to {rows}, or {BOTH.lower()}")

    def _dtype(self, packed: PackedCheckpoint) -> Iterator[Finding]:
        announced = dtype_name(packed.config)
        # Tools of GPTQ and AWQ announce the dtype that their kernels compute in, whatever the other tensors have.
        if packed.format == "gguf" or (packed.modules and announced == "float16"):
            return
        dtypes = Counter(packed.files.dtype(name) for name in packed.dense_names())
        floats = {
            str(dtype).removeprefix("torch."): count for dtype, count in dtypes.items() if dtype.is_floating_point
        }
        if floats and announced not in floats:
            found = ", ".join(f"{count} of {name}" for name, count in sorted(floats.items()))
            problem = f"dtype is {announced}, but the unquantized tensors are {found}"
            most = max(floats, key=lambda name: floats[name])
            yield self.warning("dtype", "config.json", problem, f'Set "dtype": "{most}" in config.json')


def _layer(name: str) -> tuple[str, int] | None:
    """Returns the first stack of layers in a tensor's name, and the index in it."""
    found = re.match(r"(.+?)\.(\d+)\.", name)
    return (found[1], int(found[2])) if found else None
