"""The cheapest ways to fit more, in order: what costs nothing first, what changes answers last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint.scheme import GROUP_SIZES, Scheme
from runtime.capacity.capacity import ITEM_SIZES, Capacity, estimate
from runtime.capacity.weights import Weights
from runtime.config import RuntimeConfig
from runtime.free_memory import format_bytes
from runtime.kernels.base import Target
from runtime.kernels.cpu import is_fast
from runtime.kv_budget import find_budget

SHORTEST_CONTEXT = 512
MOST_SEQUENCES = 256
"""Computed together: beyond it a step takes longer and little is won."""
KV_REMEDIES = ("int8", "int4")
BIT_WIDTHS = (4, 3, 2)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way, and what it gives.

    Attributes:
        command: what to type.
        cost: what is given up.
        effect: in words, with numbers.
        tokens: that fit then. concurrency: requests that fit then, of `length` tokens each.
    """

    command: str
    cost: str
    effect: str
    tokens: int
    concurrency: int
    length: int


def find_remedies(path: Path, weights: Weights, config: RuntimeConfig, now: Capacity) -> list[Remedy]:
    """Ways that give room for more tokens or more requests than `now`, the cheapest first."""
    ways = [*_whole_memory(path, config, now, weights), *_shorter_context(path, now)]
    ways += _narrower_dtype(path, weights, now)
    ways += _narrower_keys(path, weights, now)
    return ways + list(_fewer_bits(path, weights, now))


def _remedy(command: str, cost: str, effect: str, then: Capacity) -> Remedy:
    return Remedy(command, cost, effect, then.tokens, then.concurrency(then.context), then.context)


def _whole_memory(path: Path, config: RuntimeConfig, now: Capacity, weights: Weights) -> Iterator[Remedy]:
    """The default on a CPU is far below what a machine may have; a GPU is used as a whole."""
    if config.kv_memory_bytes is None and weights.target.device.type == "cuda":
        return
    sequences = max(config.max_num_sequences, min(now.concurrency(now.context), MOST_SEQUENCES))
    wider = replace(config, max_num_sequences=sequences)
    then = estimate(weights.config, wider, now.dtype, now.weight_bytes, now.memory_bytes)
    used = min(then.num_blocks, sequences * then.reach.blocks_for(then.context, then.step, then.block_size))
    kv_bytes = used * then.block_size * then.token_bytes + then.exact.nbytes
    given = find_budget(config, 0, None).nbytes
    if kv_bytes <= given or not used:
        return
    options = f"--kv-memory {-(-kv_bytes // 2**20)}MiB"
    options += f" --max-sequences {sequences}" if sequences > config.max_num_sequences else ""
    effect = f"{format_bytes(kv_bytes)} of KV memory instead of {format_bytes(given)}"
    tokens, concurrency = used * then.block_size, min(sequences, then.concurrency(then.context))
    yield Remedy(
        f"runtime serve {path} {options}", "nothing: memory that is free", effect, tokens, concurrency, then.context
    )


def _shorter_context(path: Path, now: Capacity) -> Iterator[Remedy]:
    length = now.context // 2
    if length < SHORTEST_CONTEXT or now.reach.window is not None:
        return
    then = replace(now, context=length)
    if then.concurrency(length) > now.concurrency(now.context):
        effect = f"{then.concurrency(length)} requests of {length} tokens instead of {now.concurrency(now.context)} "
        effect += f"of {now.context}"
        yield _remedy(f"runtime serve {path} --max-model-len {length}", "longer requests are refused", effect, then)


def _narrower_dtype(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    import torch

    if ITEM_SIZES[now.dtype] == ITEM_SIZES["bfloat16"]:
        return
    if weights.target.device.type == "cpu" and not is_fast(torch.bfloat16):
        return
    narrow = replace(weights, target=Target(weights.target.device, torch.bfloat16))
    then = now.in_dtype(weights.config, "bfloat16", narrow.prepared())
    effect = f"{format_bytes(then.token_bytes)} of KV per token instead of {format_bytes(now.token_bytes)}, and "
    effect += f"weights of {format_bytes(then.weight_bytes)} instead of {format_bytes(now.weight_bytes)}"
    yield _remedy(f"runtime serve {path} --dtype bfloat16", "activations are rounded to 16 bits", effect, then)


def _narrower_keys(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    if not now.kv_cache.is_exact:
        return
    for name in KV_REMEDIES:
        then = now.with_kv_format(weights.config, name)
        effect = f"{format_bytes(then.token_bytes)} of KV per token instead of {format_bytes(now.token_bytes)}"
        cost = f"a little quality; `compress eval --ppl --kv-cache {name}` measures it"
        yield _remedy(f"runtime serve {path} --kv-cache {name}", cost, effect, then)


def _fewer_bits(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    """Each width that makes prepared weights smaller than all before. Packed checkpoints name their dense source."""
    smallest = now.weight_bytes
    source = path if not weights.checkpoint.modules else "SOURCE"
    for scheme, options in _schemes(weights):
        size = weights.prepared(dict.fromkeys(weights.schemes, scheme))
        if size >= smallest:
            continue
        smallest = size
        then = replace(now, weight_bytes=size)
        effect = f"weights of {format_bytes(size)} instead of {format_bytes(now.weight_bytes)}"
        cost = "a little quality; `compress eval --ppl` measures it"
        yield _remedy(f"compress quantize {source} {options}", cost, effect, then)


def _schemes(weights: Weights) -> Iterator[tuple[Scheme, str]]:
    columns = {weights.checkpoint.shape(module)[1] for module in weights.schemes}
    yield Scheme(8, None, True, 8), "--method smoothquant"
    group = next((size for size in reversed(GROUP_SIZES) if all(n % size == 0 for n in columns)), None)
    for bits in BIT_WIDTHS:
        yield Scheme(bits, group), f"--method gptq --bits {bits} --group-size {group or -1}"
