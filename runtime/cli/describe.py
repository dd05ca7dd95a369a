"""What to tell the user about a checkpoint and the engine that serves it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from compress.checkpoint.kv_cache import UNCOMPRESSED

if TYPE_CHECKING:
    from runtime.engine import Engine


def describe_scheme(path: Path) -> str:
    """How the weights are stored: `compressed-tensors, w4a16 g128 sym (42 linears)`."""
    from compress.checkpoint.reader import PackedCheckpoint

    checkpoint = PackedCheckpoint.open(path)
    # Ranks may differ from layer to layer; what is alike in the rest is one kind.
    counts = Counter(re.sub(r" rank \d+", " low rank", str(scheme)) for scheme in checkpoint.schemes.values())
    schemes = ", ".join(f"{scheme} ({count} linears)" for scheme, count in counts.most_common())
    return f"{checkpoint.format}, {schemes}" if schemes else f"dense {str(checkpoint.dtype).removeprefix('torch.')}"


def describe_kv_form(engine: Engine) -> str:
    """How keys and values are kept, and why: `int4 rotated (as asked for)`."""
    from runtime.runner import ModelRunner

    runner = engine.runner
    return runner.memory.kv_choice.describe() if isinstance(runner, ModelRunner) else str(UNCOMPRESSED)


def describe_kernels(engine: Engine) -> list[str]:
    """Which kernel multiplies what, and why it, one line a kind: what is slow, or not as asked for, shows here."""
    from runtime.runner import ModelRunner

    return [*engine.runner.decoder.description] if isinstance(engine.runner, ModelRunner) else []


def describe_attention(engine: Engine) -> str:
    """What computes attention, and why it: `compiled, reads pages as they are; all layers in one call`."""
    from runtime.runner import ModelRunner

    runner = engine.runner
    if not isinstance(runner, ModelRunner):
        return "none"
    attention = runner.cache.reason if runner.triton_refusal else "Triton, reads pages as they are"
    if runner.decoder.device.type == "cuda" and runner.triton_refusal:
        attention = f"plain torch; Triton {runner.triton_refusal}"
    if runner.layers_refusal:
        return f"{attention}; layer by layer: {runner.layers_refusal}"
    return f"{attention}; {'fused kernels between products' if runner.triton_layers else 'all layers in one call'}"


def describe_gpu(engine: Engine) -> list[str]:
    """What only a GPU has: how its memory is divided, and which steps are recorded. Nothing on a CPU."""
    from runtime.memory_lines import explain
    from runtime.runner import ModelRunner

    runner = engine.runner
    if not isinstance(runner, ModelRunner) or runner.decoder.device.type != "cuda":
        return []
    steps = f"launched kernel by kernel: {runner.graphs_refusal}"
    if runner.graphs is not None:
        sizes = ", ".join(map(str, runner.graphs.sizes))
        steps = f"of one token for each of {sizes} sequences are recorded at their first use (CUDA graphs)"
    return [*(f"memory    {line}" for line in explain(runner.memory)), f"steps     {steps}"]


def describe_memory(engine: Engine) -> str:
    """Room in the KV cache: `16384 tokens in 1024 blocks, 8.0 requests of the whole context`."""
    runner, config = engine.runner, engine.config
    needed = runner.reach.blocks_for(runner.max_model_len, config.max_span_tokens, config.block_size)
    num_tokens, requests = runner.num_blocks * config.block_size, runner.num_blocks / needed
    room = f"{num_tokens} tokens in {runner.num_blocks} blocks, {requests:.1f} requests of the whole context"
    if runner.num_host_blocks:
        room += f", {runner.num_host_blocks * config.block_size} more tokens in host memory"
    if runner.reach.window is None:
        return room
    return f"{room} ({needed} blocks each: tokens see {runner.reach})"
