"""Attention of models without any: nothing is kept, and nothing is computed."""

from __future__ import annotations

from torch import Tensor

from runtime.backends.base import Attention, AttentionKernel, AttentionStep, Model
from runtime.backends.kv_pages import KVCache, make_pages
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise ValueError(f"layer {layer} has attention, and the model has none")


def _prepare(model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan) -> AttentionStep:
    def step(batch: Batch) -> Attention:
        return _attend

    return step


NO_ATTENTION = AttentionKernel("no layer has attention", lambda model, memory: "", make_pages, _prepare)
