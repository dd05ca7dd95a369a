"""Lines that describe a loaded engine: capacity, kernels and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import interrupts_held

if TYPE_CHECKING:
    from runtime.core.config import RuntimeConfig
    from runtime.engine.engine import Engine
    from runtime.runner.runner import ModelRunner


def describe_scheme(path: Path) -> str:
    """Describes the storage of the weights, see `PackedCheckpoint.describe`."""
    with interrupts_held():  # the first import of torch
        from compress.checkpoint.reader import PackedCheckpoint

    return PackedCheckpoint.open(path).describe()


def describe_engine(engine: Engine) -> Iterator[str]:
    """Describes capacity and kernels, one line each."""
    from compress.common.device import format_bytes

    config, runner = engine.config, cast("ModelRunner", engine.runner)
    yield f"context   {runner.max_model_len} tokens"
    yield f"KV cache  {describe_memory(engine)}"
    if config.num_ranks > 1:
        weights, pages = map(format_bytes, (runner.memory.weight_bytes, runner.memory.pool_bytes))
        yield f"ranks     {config.num_ranks}, this one with {weights} of weights and {pages} of KV cache"
    yield f"KV dtype  {runner.memory.kv_choice.describe()}"
    yield from (f"kernels   {line}" for line in join_equal(runner.decoder.description))
    yield f"attention {runner.kernels.describe()}"
    yield from describe_gpu(runner, engine.config)
    if config.serves_adapters:
        held = f"{config.max_loras} of rank {config.max_lora_rank} on the device, {config.max_cpu_loras} in host memory"
        yield f"adapters  at most {held}; {len(config.lora_modules or ())} are loaded"
    if config.speculative_model:
        drafter = HubModel.of_cached(Path(config.speculative_model)) or config.speculative_model
        drafting = f"drafting  {drafter}, up to {config.num_speculative_tokens} tokens"
        yield f"{drafting}, {config.spec_verify}"


def join_equal(lines: Iterable[str]) -> list[str]:
    """Joins the lines `names: form, kernel` that differ in their names only."""
    names: dict[str, list[str]] = {}
    for line in lines:
        name, _, kernel = line.partition(": ")
        names.setdefault(kernel or line, []).append(name)
    return [kernel if kernel in found else f"{', '.join(found)}: {kernel}" for kernel, found in names.items()]


def describe_gpu(runner: ModelRunner, config: RuntimeConfig) -> list[str]:
    """Describes GPU memory, sizes of steps and CUDA graphs; empty on a CPU."""
    from runtime.memory.plan import explain

    if runner.decoder.device.type != "cuda":
        return []
    sizes = f"of at most {config.step_tokens} tokens, {config.max_span_tokens} of one prompt"
    limit = f"{sizes} ({config.step_sizes_reason})"
    steps = f"launched kernel by kernel: {runner.graphs_reason}"
    if runner.graphs is not None:
        sizes = ", ".join(map(str, runner.graphs.sizes))
        drafts = ", ".join(map(str, runner.graphs.draft_sizes[1:]))
        verified = f", with {drafts} draft tokens or none," if drafts else ""
        when = " while the server is idle, or at their first use" if runner.later else " at their first use"
        when = "" if runner.graphs.is_complete else when
        longest = max(runner.graphs.prompt_sizes, default=0)
        prompts = f"; with prompts of up to {longest} tokens as well" if longest else ""
        steps = f"of one token for each of {sizes} sequences{verified} are captured{when} (CUDA graphs){prompts}"
    return [
        *(f"memory    {line}" for line in explain(runner.memory)),
        f"steps     {limit}",
        f"steps     {steps}",
    ]


def describe_memory(engine: Engine) -> str:
    """Describes the capacity of the KV cache: `16384 tokens in 1024 blocks, 8.0 requests of the whole context`."""
    runner, config = engine.runner, engine.config
    needed = runner.attention_window.blocks_for(runner.max_model_len, config.max_span_tokens, config.block_size)
    num_tokens, requests = runner.num_blocks * config.block_size, runner.num_blocks / needed
    room = f"{num_tokens} tokens in {runner.num_blocks} blocks, {requests:.1f} requests of the whole context"
    if runner.num_host_blocks:
        room += f", {runner.num_host_blocks * config.block_size} more tokens in host memory"
    if runner.attention_window.window is None:
        return room
    return f"{room} ({needed} blocks each: tokens see {runner.attention_window})"
