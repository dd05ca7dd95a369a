"""Engines that load what is written in each container: by their sources and documentation, in so far as
`docs/checkpoint-format.md` does not name a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from compress.checkpoint.scheme import Scheme

RUNTIME, TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP = "this runtime", "transformers", "vLLM", "SGLang", "llama.cpp"
EXLLAMA = "exllamav3"
Takes: TypeAlias = Callable[[Scheme], bool]
"""Whether an engine loads a form in a container."""


def _all(scheme: Scheme) -> bool:
    return True


def _whole_bytes(scheme: Scheme) -> bool:
    """Integers of 4 and 8 bits, and 8-bit floats."""
    return scheme.numbers in ("int", "float") and scheme.bits in (4, 8)


READERS: Mapping[str, Mapping[str, Takes]] = {
    "compressed-tensors": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _whole_bytes},
    "gptq": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _whole_bytes},
    "awq": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _all},
    "fp8": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _all},
    "gguf": {RUNTIME: _all, LLAMA_CPP: _all},
    "dense": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _all, f"{LLAMA_CPP} (its converter)": _all},
    "compress-runtime": {RUNTIME: _all, f"{VLLM} (plugin)": _all},
}
"""By container that is written here, and engine."""
FOREIGN_READERS: Mapping[str, Mapping[str, Takes]] = {
    "mxfp4": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all, SGLANG: _all},
    "exl3": {RUNTIME: _all, EXLLAMA: _all},
    "auto-round": {RUNTIME: _all},
    "torchao": {RUNTIME: _all},
    "bitsandbytes": {RUNTIME: _all, TRANSFORMERS: _all, VLLM: _all},
}
"""The same of containers that are only read here."""


def readers(format: str, schemes: Iterable[Scheme]) -> list[str]:
    """Engines that load a container of this name with all of these forms."""
    forms = list(schemes)
    engines = {**READERS, **FOREIGN_READERS}.get(format, {})
    return [engine for engine, takes in engines.items() if all(map(takes, forms))]
