"""The answer of `runtime memory`: as text for people, as JSON for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.checkpoint.kv_cache import KV_FORMATS
from compress.checkpoint.locate import shown_name
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.device import available_bytes, format_bytes, resolve_device, total_bytes
from compress.common.errors import ToolkitError
from compress.models.cuts import Rank
from runtime.backends.base import Target
from runtime.backends.registry import is_fast
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig
from runtime.memory.capacity import ITEM_SIZES, Capacity, estimate
from runtime.memory.estimate import Weights, kv_token_bytes
from runtime.memory.losses import KEYS, grade, weight_forms
from runtime.memory.plan import explain, find_budget, plan_memory, pool_bytes
from runtime.model.expected_tensors import expected_linears
from runtime.model.expert_offload import check_expert_cache
from runtime.model.loader import cut_model, read_model, resolve_dtype
from runtime.parallel.costs import LINKS, step_traffic
from runtime.parallel.stages import plan_stages

SHORTEST_CONTEXT = 512
MOST_SEQUENCES = 256
"""Computed together: beyond it a step takes longer and little is won."""
LEAST_GAIN = 1.05
"""Least ratio of tokens that fit with a remedy to those without it: for less, nothing is worth giving up."""


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
    """Ways that give room for more requests or at least `LEAST_GAIN` times the tokens of `now`, the cheapest first."""
    ways = [*_narrower_dtype(path, weights, now), *_experts_on_host(path, weights, now)]
    ways += [*_narrower_keys(path, weights, now), *_fewer_bits(path, weights, now)]
    gains = [each for each in ways if each.tokens > LEAST_GAIN * now.tokens]
    return [*_whole_memory(path, config, now, weights), *_shorter_context(path, now), *gains]


def _remedy(command: str, cost: str, effect: str, then: Capacity) -> Remedy:
    return Remedy(command, cost, effect, then.tokens, then.concurrency(then.context), then.context)


def _whole_memory(path: Path, config: RuntimeConfig, now: Capacity, weights: Weights) -> Iterator[Remedy]:
    """The default on a CPU is far below what a machine may have; a GPU is used as a whole."""
    if config.kv_memory_bytes is None and weights.target.device.type == "cuda":
        return
    sequences = max(config.max_num_seqs, min(now.concurrency(now.context), MOST_SEQUENCES))
    wider = replace(config, max_num_seqs=sequences)
    then = estimate(weights.config, wider, now.dtype, now.weight_bytes, now.memory_bytes)
    used = min(then.num_blocks, sequences * then.attention_window.blocks_for(then.context, then.step, then.block_size))
    kv_bytes = used * then.block_size * then.token_bytes + then.exact.nbytes + then.states.nbytes
    given = find_budget(config, 0, None).nbytes
    if kv_bytes <= LEAST_GAIN * given or not used:
        return
    options = f"--kv-memory {-(-kv_bytes // 2**20)}MiB"
    options += f" --max-num-seqs {sequences}" if sequences > config.max_num_seqs else ""
    effect = f"{format_bytes(kv_bytes)} of KV memory instead of {format_bytes(given)}"
    tokens, concurrency = used * then.block_size, min(sequences, then.concurrency(then.context))
    yield Remedy(
        f"runtime serve {path} {options}", "nothing: memory that is free", effect, tokens, concurrency, then.context
    )


def _shorter_context(path: Path, now: Capacity) -> Iterator[Remedy]:
    length = now.context // 2
    if length < SHORTEST_CONTEXT or now.attention_window.window is not None:
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
    then = now.changed(weights.config, "bfloat16", weight_bytes=narrow.prepared())
    effect = f"{format_bytes(then.token_bytes)} of KV per token instead of {format_bytes(now.token_bytes)}, and "
    effect += f"weights of {format_bytes(then.weight_bytes)} instead of {format_bytes(now.weight_bytes)}"
    yield _remedy(f"runtime serve {path} --dtype bfloat16", "activations are rounded to 16 bits", effect, then)


def _narrower_keys(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    if not now.kv_cache.is_exact or not now.token_bytes:
        return
    for name, kl in KEYS.items():
        if not kl:
            continue
        then = now.changed(weights.config, format=name)
        effect = f"{format_bytes(then.token_bytes)} of KV per token instead of {format_bytes(now.token_bytes)}"
        cost = f"{grade(kl)}; `compress eval --ppl --kv-cache {name}` measures it"
        yield _remedy(f"runtime serve {path} --kv-cache {name}", cost, effect, then)


def _experts_on_host(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    """The largest of some caches of experts that makes more requests fit."""
    mixtures = [block.mixture for block in weights.config.spec.blocks if block.mixture is not None]
    if weights.target.device.type == "cpu" or weights.moe_expert_cache is not None or not mixtures:
        return
    slots = max(len(mixture.experts) for mixture in mixtures) // 2
    while slots >= max(mixture.router.num_chosen for mixture in mixtures):
        cached = replace(weights, moe_expert_cache=slots)
        then = replace(now, weight_bytes=cached.prepared())
        if then.concurrency(then.context) > now.concurrency(now.context):
            effect = f"weights of {format_bytes(then.weight_bytes)} on the GPU instead of "
            effect += f"{format_bytes(now.weight_bytes)}, and {format_bytes(cached.expert_bytes)} of host memory"
            cost = "speed: other experts are copied to the GPU when they are chosen"
            yield _remedy(f"runtime serve {path} --moe-expert-cache {slots}", cost, effect, then)
            return
        slots //= 2


def _fewer_bits(path: Path, weights: Weights, now: Capacity) -> Iterator[Remedy]:
    """Each width that gives `LEAST_GAIN` times the tokens of all before. Packed checkpoints name their dense source."""
    most = now.tokens
    source = path if not weights.checkpoint.modules else "SOURCE"
    for form in weight_forms({weights.checkpoint.shape(module)[1] for module in weights.schemes}):
        if not isinstance(form.scheme, Int):
            continue
        size = weights.prepared(dict.fromkeys(weights.schemes, form.scheme))
        then = replace(now, weight_bytes=size)
        if then.tokens <= LEAST_GAIN * most:
            continue
        most = then.tokens
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in form.stage.items())
        effect = f"weights of {format_bytes(size)} instead of {format_bytes(now.weight_bytes)}"
        cost = f"{grade(form.kl)}; `compress eval --ppl` measures it"
        yield _remedy(f"compress quantize {source} {options}", cost, effect, then)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about one checkpoint on one machine.

    Attributes:
        where: what the memory is: `the free memory of this machine`, or `as asked for`.
        scheme: how the weights are stored.
        stored_bytes: of the weights in the files.
        plan: what `runtime serve` would allocate, or why it refuses.
        expert_bytes: experts in host memory, which is not the memory of the capacity.
        messages: among ranks, one line for each kind of step.
    """

    name: str
    where: str
    scheme: str
    model: DecoderConfig
    stored_bytes: int
    capacity: Capacity
    plan: MemoryPlan | str
    remedies: list[Remedy]
    expert_bytes: int = 0
    messages: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        capacity, plan = self.capacity, self.plan
        return {
            "model": self.name,
            "scheme": self.scheme,
            "memory_bytes": capacity.memory_bytes,
            "weights_stored_bytes": self.stored_bytes,
            "weights_prepared_bytes": capacity.weight_bytes,
            "host_expert_bytes": self.expert_bytes,
            "activation_bytes": capacity.activation_bytes,
            "process_bytes": capacity.process_bytes,
            "dtype": capacity.dtype,
            "kv_cache": capacity.kv_cache.to_dict(),
            "kv_exact_bytes": capacity.exact.nbytes,
            "kv_bytes_per_token": {
                name: kv_token_bytes(self.model, itemsize=size) for name, size in ITEM_SIZES.items()
            },
            "kv_formats": {
                name: {
                    "bytes_per_token": then.token_bytes,
                    "tokens_per_gib": 2**30 // then.token_bytes,
                    "tokens": then.tokens,
                }
                for name, then in self._formats().items()
            },
            "room_bytes": capacity.room,
            "fits": capacity.num_blocks > 0,
            "kv_bytes": capacity.kv_bytes,
            "state_bytes_per_sequence": capacity.state_bytes,
            "state_slots": capacity.states.num_slots,
            "tokens": capacity.tokens,
            "context": capacity.context,
            "concurrency": {str(length): capacity.concurrency(length) for length in capacity.lengths()},
            "serve": {"error": plan}
            if isinstance(plan, str)
            else {
                name: getattr(plan, name) for name in ("kv_bytes", "num_blocks", "tokens", "max_model_len", "reason")
            },
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield from self._needs()
        yield from self._fits()
        yield "\n`runtime serve` with these options:"
        yield from (f"  {line}" for line in self._explained_plan())
        yield from self._ways()
        if self.messages:
            yield "\nMessages among ranks, and their time on a link, by arithmetic, not measured:"
            yield from self.messages

    def _needs(self) -> Iterator[str]:
        capacity = self.capacity
        yield f"{self.name}: {self.scheme}, {self.model.num_layers} layers, context {capacity.context}"
        yield f"\n  memory       {format_bytes(capacity.memory_bytes):>10}  {self.where}"
        stored = format_bytes(self.stored_bytes)
        yield f"  weights      {format_bytes(capacity.weight_bytes):>10}  prepared for their kernels; {stored} in files"
        if self.expert_bytes:
            host = format_bytes(self.expert_bytes)
            yield f"  experts      {host:>10}  in host memory; the weights have room for copies of some"
        yield f"  activations  {format_bytes(capacity.activation_bytes):>10}  of the largest step, about"
        yield f"  process      {format_bytes(capacity.process_bytes):>10}  Python, torch and the server, about"
        if capacity.room < 0:
            yield f"  missing      {format_bytes(-capacity.room):>10}  it does not fit"
            return
        copy = format_bytes(capacity.room - capacity.kv_bytes)
        if capacity.token_bytes:
            yield f"  KV cache     {format_bytes(capacity.kv_bytes):>10}  what is left, but {copy} for attention"
        if states := capacity.states.num_slots:
            each = f"{states} recurrent states of {format_bytes(capacity.state_bytes)} each"
            whole = "of that, for" if capacity.token_bytes else "what is left:"
            yield f"  states       {format_bytes(capacity.states.nbytes):>10}  {whole} {each}"

    def _fits(self) -> Iterator[str]:
        capacity = self.capacity
        yield from self._kv_formats()
        if not capacity.num_blocks:
            return
        if not capacity.token_bytes:
            yield f"Fit: {capacity.states.max_running:,} requests of any length"
            return
        yield f"Fit: {capacity.tokens:,} tokens, that is"
        for length in capacity.lengths():
            note = " (the whole context)" if length == capacity.context else ""
            yield f"  {capacity.concurrency(length):>8,} requests of {length:,} tokens{note}"

    def _formats(self) -> dict[str, Capacity]:
        """Capacity with each format of keys and values; empty for a model that keeps none."""
        formats = KV_FORMATS if self.capacity.token_bytes else ()
        return {name: self.capacity.changed(self.model, format=name) for name in formats}

    def _kv_formats(self) -> Iterator[str]:
        """A table; in it the form that is served has its exact tokens taken off."""
        capacity = self.capacity
        if not capacity.token_bytes:
            yield "\nNo layer keeps keys and values: memory does not grow with the length of a request."
            return
        yield f"\nKeys and values of one token, served as {capacity.kv_cache} in {capacity.dtype}:"
        yield f"  {'--kv-cache':10}  {'per token':>10}  {'bits':>5}  {'tokens per GiB':>14}  {'tokens here':>11}"
        for name, then in self._formats().items():
            bits = 8 * then.token_bytes / self.model.spec.kv_token_bytes(lambda key, value: key + value)
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


def inspect(path: Path, scheme: str, config: RuntimeConfig, memory_bytes: int | None = None) -> Report:
    """Estimates what a checkpoint needs and what fits in the given, or the free, memory. Reads no weights.

    Args:
        scheme: how the weights are stored, in words.

    Raises:
        CheckpointError: the folder cannot be read or served, and why.
        ToolkitError: a device, dtype or kernel that is not there.
    """
    checkpoint = PackedCheckpoint.open(path)
    model = read_model(checkpoint, config.trust_remote_code)
    device = resolve_device(config.device)
    config = config.with_step_sizes(total_bytes(device))
    target = Target(device, resolve_dtype(config.dtype, model.dtype, device))
    ranks, whole = config.num_ranks, model
    memory = available_bytes(device) if memory_bytes is None else memory_bytes
    if ranks > 1:
        model, memory = largest_part(model, checkpoint, config), memory // ranks if device.type == "cpu" else memory
    if config.moe_expert_cache is not None:
        check_expert_cache(config.moe_expert_cache, model.spec, device)
    weights = Weights(checkpoint, model, target, config.linear_backend, memory, config.moe_expert_cache)
    dtype, weight_bytes = str(target.dtype).removeprefix("torch."), weights.prepared()
    capacity = estimate(model, config, dtype, weight_bytes, memory)
    return Report(
        Path(shown_name(path.resolve())).name,
        ("as asked for" if memory_bytes is not None else f"free on this {device.type.upper()} now")
        + (f", for each of {ranks} ranks" if ranks > 1 else ""),
        scheme,
        model,
        weights.stored_bytes,
        capacity,
        _plan(weights, weight_bytes, dtype, config, memory),
        find_remedies(Path(shown_name(path)), weights, config, capacity) if ranks == 1 else [],
        weights.expert_bytes,
        tuple(describe_messages(whole, config, target.dtype.itemsize)) if ranks > 1 else (),
    )


def describe_messages(model: DecoderConfig, config: RuntimeConfig, itemsize: int) -> Iterator[str]:
    """Describes the messages of three steps: a token of one sequence, of all of them, and a part of a prompt."""
    sizes, rows = (config.tensor_parallel_size, config.pipeline_parallel_size), config.max_num_seqs
    yield f"  {'tokens':>7}  {'logits':>6}  {'bytes':>10}" + "".join(f"  {link.name:>12}" for link in LINKS)
    for num_tokens, num_rows in ((1, 1), (rows, rows), (config.max_span_tokens, 1)):
        parts = step_traffic(model.spec, *sizes, num_tokens, num_rows, itemsize)
        times = "".join(f"  {sum(part.microseconds(link) for part in parts):9.0f} us" for link in LINKS)
        yield f"  {num_tokens:7}  {num_rows:6}  {format_bytes(round(sum(part.nbytes for part in parts))):>10}{times}"


def largest_part(model: DecoderConfig, checkpoint: PackedCheckpoint, config: RuntimeConfig) -> DecoderConfig:
    """Describes the part of a model that is the largest of those that some ranks hold, with its tokens of the
    vocabulary.

    Raises:
        ToolkitError: a model that ranks cannot share.
    """
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    parts = [cut_model(model, checkpoint, Rank(index, ranks))[0] for index in range(ranks)] if ranks > 1 else [model]
    if stages > 1:
        layers = [stage.layers for stage in plan_stages(model, checkpoint, stages, pool_bytes(config))]
        parts = [part.keep_stage(each) for each in layers for part in parts]
    largest = max(parts, key=lambda part: sum(math.prod(linear.shape) for linear in expected_linears(part, checkpoint)))
    vocab_size, inputs = -(-model.spec.vocab_size // ranks), model.spec.layer_inputs
    inputs = None if inputs is None else replace(inputs, vocab_size=-(-inputs.vocab_size // ranks))
    return replace(largest, spec=replace(largest.spec, vocab_size=vocab_size, layer_inputs=inputs))


def _plan(
    weights: Weights, weight_bytes: int, dtype: str, config: RuntimeConfig, memory_bytes: int
) -> MemoryPlan | str:
    """The allocation of this configuration, or the error message."""
    free = memory_bytes - weight_bytes if weights.target.device.type == "cuda" else None
    try:
        plan = plan_memory(weights.config, weight_bytes, ITEM_SIZES[dtype], config, free)
        return replace(plan, expert_bytes=weights.expert_bytes)
    except ToolkitError as error:
        return str(error)
