"""MXFP4 as gpt-oss publishes it (`quant_method: mxfp4`): experts alone are quantized. It is read, not written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM, ReadOnly
from compress.checkpoint.weights import Mxfp4, Scheme


class Mxfp4Container(ReadOnly):
    """MXFP4 of gpt-oss."""

    name = "mxfp4"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    stored = Mxfp4.suffixes
    mark = ".weight_packed"

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the same for all."""
        return dict[str, Scheme].fromkeys(modules, Mxfp4())


MXFP4 = CONTAINERS.register(order=10)(Mxfp4Container())
