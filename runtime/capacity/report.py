"""The answer of `runtime memory`: as text for people, as JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from compress.checkpoint.kv_cache import KV_FORMATS
from runtime.capacity.capacity import ITEM_SIZES, Capacity
from runtime.capacity.remedies import Remedy
from runtime.free_memory import format_bytes
from runtime.kv_bytes import kv_token_bytes
from runtime.memory import MemoryPlan
from runtime.memory_lines import explain
from runtime.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about one checkpoint on one machine.

    Attributes:
        where: what the memory is: `the free memory of this machine`, or `as asked for`.
        scheme: how the weights are stored.
        stored_bytes: of the weights in the files.
        plan: what `runtime serve` would allocate, or why it refuses.
    """

    name: str
    where: str
    scheme: str
    model: DecoderConfig
    stored_bytes: int
    capacity: Capacity
    plan: MemoryPlan | str
    remedies: list[Remedy]

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        capacity, plan = self.capacity, self.plan
        return {
            "model": self.name,
            "scheme": self.scheme,
            "memory_bytes": capacity.memory_bytes,
            "weights_stored_bytes": self.stored_bytes,
            "weights_prepared_bytes": capacity.weight_bytes,
            "activation_bytes": capacity.activation_bytes,
            "process_bytes": capacity.process_bytes,
            "dtype": capacity.dtype,
            "kv_cache": capacity.kv_cache.to_dict(),
            "kv_exact_bytes": capacity.exact.nbytes,
            "kv_bytes_per_token": {
                name: kv_token_bytes(self.model, itemsize=size) for name, size in ITEM_SIZES.items()
            },
            "kv_formats": {name: _format_json(then) for name, then in self._formats().items()},
            "room_bytes": capacity.room,
            "fits": capacity.num_blocks > 0,
            "kv_bytes": capacity.kv_bytes,
            "tokens": capacity.tokens,
            "context": capacity.context,
            "concurrency": {str(length): capacity.concurrency(length) for length in capacity.lengths()},
            "serve": {"error": plan} if isinstance(plan, str) else _plan_json(plan),
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield from self._needs()
        yield from self._fits()
        yield "\n`runtime serve` with these options:"
        yield from (f"  {line}" for line in self._explained_plan())
        yield from self._ways()

    def _needs(self) -> Iterator[str]:
        capacity = self.capacity
        yield f"{self.name}: {self.scheme}, {self.model.num_layers} layers, context {capacity.context}"
        yield f"\n  memory       {format_bytes(capacity.memory_bytes):>10}  {self.where}"
        stored = format_bytes(self.stored_bytes)
        yield f"  weights      {format_bytes(capacity.weight_bytes):>10}  prepared for their kernels; {stored} in files"
        yield f"  activations  {format_bytes(capacity.activation_bytes):>10}  of the largest step, about"
        yield f"  process      {format_bytes(capacity.process_bytes):>10}  Python, torch and the server, about"
        if capacity.room < 0:
            yield f"  missing      {format_bytes(-capacity.room):>10}  it does not fit"
            return
        copy = format_bytes(capacity.room - capacity.kv_bytes)
        yield f"  KV cache     {format_bytes(capacity.kv_bytes):>10}  what is left, but {copy} for attention"

    def _fits(self) -> Iterator[str]:
        capacity = self.capacity
        yield from self._kv_formats()
        if not capacity.num_blocks:
            return
        yield f"Fit: {capacity.tokens:,} tokens, that is"
        for length in capacity.lengths():
            note = " (the whole context)" if length == capacity.context else ""
            yield f"  {capacity.concurrency(length):>8,} requests of {length:,} tokens{note}"

    def _formats(self) -> dict[str, Capacity]:
        """What would fit in each form of keys and values."""
        return {name: self.capacity.with_kv_format(self.model, name) for name in KV_FORMATS}

    def _kv_formats(self) -> Iterator[str]:
        """A table; in it the form that is served has its exact tokens taken off."""
        capacity = self.capacity
        yield f"\nKeys and values of one token, served as {capacity.kv_cache} in {capacity.dtype}:"
        yield f"  {'--kv-cache':10}  {'per token':>10}  {'bits':>5}  {'tokens per GiB':>14}  {'tokens here':>11}"
        for name, then in self._formats().items():
            bits = then.kv_cache.bits_per_number(self.model.head_dim, ITEM_SIZES[capacity.dtype])
            here = f"{max(0, then.tokens):,}"
            size = format_bytes(then.token_bytes)
            yield f"  {name:10}  {size:>10}  {bits:5.2f}  {2**30 // then.token_bytes:14,}  {here:>11}"
        if capacity.exact.nbytes:
            yield f"  and {format_bytes(capacity.exact.nbytes)} for {capacity.exact} that are kept exactly"

    def _explained_plan(self) -> list[str]:
        if isinstance(self.plan, str):
            return [f"refuses: {self.plan}"]
        lines = explain(self.plan)
        if self.plan.kv_bytes > self.capacity.kv_bytes:
            lines.append(f"too much: {format_bytes(self.capacity.kv_bytes)} are left for the KV pool")
        return lines

    def _ways(self) -> Iterator[str]:
        if self.remedies:
            yield "\nTo fit more, the cheapest first:"
        for number, remedy in enumerate(self.remedies, 1):
            yield f"  {number}. {remedy.command}"
            fits = f"{remedy.tokens:,} tokens, {remedy.concurrency:,} requests of {remedy.length:,}"
            yield f"     {remedy.effect}: {fits}. Cost: {remedy.cost}."


def _format_json(then: Capacity) -> dict[str, Any]:
    return {
        "bytes_per_token": then.token_bytes,
        "tokens_per_gib": 2**30 // then.token_bytes,
        "tokens": then.tokens,
    }


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "kv_bytes": plan.kv_bytes,
        "num_blocks": plan.num_blocks,
        "tokens": plan.num_blocks * plan.block_size,
        "max_model_len": plan.max_model_len,
        "reason": plan.reason,
    }
