"""Number of pages of the KV cache, longest sequence, form of keys and values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheRecord, KVCacheScheme, kv_cache_warning, wished_kv_cache
from compress.checkpoint.state_dtype import require_measured
from compress.common.device import available_bytes, format_bytes
from compress.common.errors import ToolkitError
from compress.models.generic import CodeSpec
from runtime.core.attention_window import NO_KEYS, AttentionWindow, resolve_attention_window
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import (
    MOST_PROMPT_ROWS,
    NO_BUDGET,
    NO_STATES,
    ExactTokens,
    KVBudget,
    KVCacheChoice,
    MemoryPlan,
    StateSlots,
)
from runtime.core.model_config import STREAM_LENGTH, DecoderConfig
from runtime.memory.estimate import (
    exact_tokens,
    gpu_step_bytes,
    kv_token_bytes,
    num_draft_tokens,
    reserve_mtp_head,
)
from runtime.speculative.ngram import CHAINS, MTP, TREES

FORMAL_BLOCKS = 2**16
"""Blocks of a model without attention, unless more are asked for: they take no memory, only bookkeeping."""


def plan_memory(
    model: DecoderConfig, weight_bytes: int, itemsize: int, config: RuntimeConfig, free_gpu_bytes: int | None = None
) -> MemoryPlan:
    """Decides the number of pages of the KV cache and the longest sequence.

    Blocks that no schedule could fill are not allocated. Without a wish for `max_model_len`, a context that the pool
    cannot hold is shortened to what it can. Where tokens look back only so far, a sequence of any length needs blocks
    for that and for one span of a prompt. A stage has the pages and slots that the whole model has, of its own layers.

    Args:
        weight_bytes: of the prepared weights.
        itemsize: bytes of one element of keys and values.
        free_gpu_bytes: of the GPU that serves, after loading the weights; None on a CPU.

    Raises:
        ToolkitError: a length beyond the model's context, a pool that cannot hold one sequence of that length, an
            attention window that does not fit in the context, or a GPU that has nothing left for keys and values.
    """
    if model.whole is None:
        return _plan_whole(model, weight_bytes, itemsize, config, free_gpu_bytes)
    share = _largest_share(model, model.whole, itemsize)
    plan = _plan_whole(model.whole, weight_bytes, itemsize, config, free_gpu_bytes, share)
    return replace(
        plan,
        token_bytes=kv_token_bytes(model, plan.kv_cache, itemsize),
        budget=replace(plan.budget, nbytes=int(plan.budget.nbytes * share)),
        states=replace(plan.states, slot_bytes=model.state_bytes(itemsize, config.state_dtype)),
    )


def _plan_whole(
    model: DecoderConfig,
    weight_bytes: int,
    itemsize: int,
    config: RuntimeConfig,
    free_gpu_bytes: int | None,
    share: float = 1.0,
) -> MemoryPlan:
    """Plans for all layers of a model. `share`: of their keys and values that the GPU holds."""
    attention_window = find_model_window(model, config)
    choice = choose_model_kv_cache(model, config, attention_window)
    token_bytes = kv_token_bytes(model, choice.scheme, itemsize)
    exact = exact_tokens(model, choice.scheme, itemsize, config.max_num_seqs)
    longest = longest_wanted(model, config)
    is_packed = isinstance(model.spec, CodeSpec) or weight_bytes < model.spec.weight_bytes(itemsize)
    step = gpu_step_bytes(model, config, itemsize, longest[0], choice.scheme, is_packed)
    budget = find_budget(config, step, free_gpu_bytes, share)
    if config.speculative_model == MTP and budget.spare_bytes:
        budget = reserve_mtp_head(budget, model, choice.scheme, itemsize)
    _check_exact(config, exact, budget)
    states = plan_states(model, config, itemsize, budget)
    left = budget.nbytes - exact.nbytes - states.nbytes
    num_blocks, blocks_per_sequence, max_model_len, reason = _fill(config, attention_window, longest, token_bytes, left)
    block_bytes = token_bytes * config.block_size
    host_blocks, host_states = _host_slots(config, choice, num_blocks, block_bytes, states.slot_bytes)
    states = _without_unused(states, config, num_blocks)
    return MemoryPlan(
        weight_bytes,
        token_bytes,
        config.block_size,
        num_blocks,
        max_model_len,
        reason,
        host_blocks,
        attention_window,
        blocks_per_sequence,
        choice,
        exact,
        config.max_num_seqs,
        budget,
        states=replace(states, num_host_slots=min(host_states, num_blocks + host_blocks)),
        num_draft_tokens=num_draft_tokens(config),
        drafts_trees=config.speculative_model == TREES,
        # States of prompts advance by scans whose launches depend on lengths.
        prompt_rows=0 if states.slot_bytes else min(config.step_tokens, MOST_PROMPT_ROWS),
        reach=attention_window if token_bytes else NO_KEYS,
    )


def _largest_share(part: DecoderConfig, whole: DecoderConfig, itemsize: int) -> float:
    """Returns the share of a stage in the pages of a model, or in its states, whichever is larger; for a stage without
    either, that of one layer."""
    sizes = (
        (kv_token_bytes(part), kv_token_bytes(whole)),
        (part.state_bytes(itemsize), whole.state_bytes(itemsize)),
    )
    return max((own / total for own, total in sizes if own), default=1 / whole.num_layers)


def _fill(
    config: RuntimeConfig, attention_window: AttentionWindow, longest: tuple[int, str], token_bytes: int, kv_bytes: int
) -> tuple[int, int, int, str]:
    """Number of blocks that `kv_bytes` hold, or that can be used.

    Args:
        longest: tokens of the longest sequence if there is memory for it, and the reason.

    Returns:
        Number of blocks, those of the longest sequence, its tokens, and the reason.

    Raises:
        ToolkitError: they cannot hold one sequence of the length that was asked for.
    """
    length, reason = longest
    needed = attention_window.blocks_for(length, config.max_span_tokens, config.block_size)
    fitting = kv_bytes // (token_bytes * config.block_size) if token_bytes else max(needed, FORMAL_BLOCKS)
    affordable = config.num_blocks or fitting
    if affordable < 1 or (config.max_model_len is not None and affordable < needed):
        raise ToolkitError(
            f"a sequence of {length} tokens needs {needed} KV pages "
            f"({format_bytes(needed * config.block_size * token_bytes)}), and the pool has {affordable}",
            "Allow more KV memory or a shorter --max-model-len",
        )
    num_blocks = config.num_blocks or min(affordable, config.max_num_seqs * needed)
    if num_blocks >= needed:
        return num_blocks, needed, length, reason
    length = num_blocks * config.block_size
    return num_blocks, num_blocks, length, f"what the KV pool holds; {reason} is {longest[0]}"


def plan_states(model: DecoderConfig, config: RuntimeConfig, itemsize: int, budget: KVBudget) -> StateSlots:
    """Decides the number of slots for recurrent states; none for a model without them.

    Args:
        itemsize: bytes of one activation.

    Raises:
        ToolkitError: no memory is left for the state of one sequence, or a dtype whose cost was not measured.
    """
    slot_bytes = model.state_bytes(itemsize, config.state_dtype)
    if not slot_bytes:
        return NO_STATES
    share = (budget.nbytes or CPU_BYTES) // (STATE_SHARE if model.spec.attentions else 1)
    given = share if config.state_memory_bytes is None else config.state_memory_bytes // config.tensor_parallel_size
    num_slots = config.num_state_slots or given // slot_bytes
    if num_slots < 1:
        raise ToolkitError(
            f"the recurrent state of one sequence takes {format_bytes(slot_bytes)}, and {format_bytes(given)} are for "
            "states",
            "Allow more --kv-memory or --state-memory",
        )
    measured = require_measured(model.states_measured, config.state_dtype)
    return StateSlots(num_slots, slot_bytes, dtype=config.state_dtype, measured=measured)


def _without_unused(states: StateSlots, config: RuntimeConfig, num_blocks: int) -> StateSlots:
    """Leaves out slots that no schedule could fill: more than those of the sequences and their drafts, and one for the
    state after each block."""
    useful = config.max_num_seqs * (1 + num_draft_tokens(config)) + num_blocks
    return states if config.num_state_slots else replace(states, num_slots=min(states.num_slots, useful))


def _check_exact(config: RuntimeConfig, exact: ExactTokens, budget: KVBudget) -> None:
    """Refuses exact tokens that leave no memory for blocks."""
    if not exact.nbytes or config.num_blocks or exact.nbytes < budget.nbytes:
        return
    raise ToolkitError(
        f"{exact.per_sequence} exact tokens of each of {exact.num_sequences} sequences take "
        f"{format_bytes(exact.nbytes)}, all of the {format_bytes(budget.nbytes)} of KV memory",
        "Keep fewer of them exact (--kv-residual-length, --kv-sinks), allow fewer --max-num-seqs or more --kv-memory",
    )


def longest_wanted(model: DecoderConfig, config: RuntimeConfig) -> tuple[int, str]:
    """Tokens of the longest sequence if there is memory for it, and the reason.

    Raises:
        ToolkitError: more than the model's context is asked for, and no window.
    """
    wanted, streams = config.max_model_len, config.attention_window is not None
    if wanted is None and streams:
        return STREAM_LENGTH, "the length of streams"
    if wanted is None and model.default_length < model.context_length:
        return model.default_length, "of short rotary factors; --max-model-len takes long ones"
    if wanted is None:
        return model.context_length, "the model's context"
    if wanted < 1 or (wanted > model.context_length and not streams):
        raise ToolkitError(
            f"max_model_len={wanted} is not between 1 and the model's context of {model.context_length} tokens",
            f"Use --max-model-len {model.context_length} or less, or --attention-window to serve endless streams",
        )
    return wanted, "as asked for"


def _host_slots(
    config: RuntimeConfig, choice: KVCacheChoice, num_blocks: int, block_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """Numbers of blocks and of recurrent states in host memory; a state takes `state_bytes`, 0 for none. Blocks that
    take no memory are as many as on the device."""
    wanted = config.kv_offload_bytes
    if not wanted:
        return 0, 0
    if choice.scheme.residual_length:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory for KV pages are of no use with "
            f"{choice.scheme.residual_length} exact recent tokens: no sequence can begin with blocks of another",
            "Leave out the host memory or the recent tokens (--kv-residual-length 0)",
        )
    if not config.prefix_caching:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory for KV pages are of no use without prefix caching",
            "Turn prefix caching on, or leave the host memory out",
        )
    least = block_bytes or state_bytes
    if wanted < least:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory hold no KV page or recurrent state of {format_bytes(least)}",
            "Allow more host memory, or none",
        )
    if not block_bytes:
        return num_blocks, wanted // state_bytes
    num_states = wanted // STATE_SHARE // state_bytes if state_bytes else 0
    return (wanted - num_states * state_bytes) // block_bytes, num_states


def explain(plan: MemoryPlan) -> list[str]:
    """One line per item, with the numbers it follows from."""
    host_tokens = plan.num_host_blocks * plan.block_size
    host = f"{plan.num_host_blocks} blocks = {host_tokens} tokens" if plan.num_host_blocks else "off"
    if plan.states.num_host_slots:
        host += f", and {plan.states.num_host_slots} recurrent states"
    return [
        f"weights  {format_bytes(plan.weight_bytes)}",
        *_experts(plan),
        *_keys_and_values(plan),
        *_states(plan),
        *_budget(plan),
        *_exact(plan),
        f"host KV  {format_bytes(plan.host_bytes)}: {host}",
        f"longest  {plan.max_model_len} tokens ({plan.reason})",
        *_reach(plan),
    ]


def _keys_and_values(plan: MemoryPlan) -> list[str]:
    blocks = f"{plan.num_blocks} blocks of {plan.block_size} tokens"
    if not plan.token_bytes:
        return [f"KV pool  none, as no layer keeps keys and values; {blocks} only identify tokens before states"]
    return [
        f"KV dtype {plan.kv_choice.describe()}",
        *(f"         {note}" for note in plan.kv_choice.notes),
        f"KV pool  {format_bytes(plan.kv_bytes)}: {blocks} = "
        f"{plan.tokens} tokens at {format_bytes(plan.token_bytes)} each",
    ]


def _experts(plan: MemoryPlan) -> list[str]:
    return [f"         and experts of {format_bytes(plan.expert_bytes)} in host memory"] if plan.expert_bytes else []


def _states(plan: MemoryPlan) -> list[str]:
    states = plan.states
    if not states.num_slots:
        return []
    each = f"{states.num_slots} recurrent states of {format_bytes(states.slot_bytes)} each{states.form}"
    use = f"of at most {states.max_running} running sequences and after cached prefixes"
    return [f"states   {format_bytes(states.nbytes)}: {each}, {use}"]


def _budget(plan: MemoryPlan) -> list[str]:
    budget = plan.budget
    if not budget.step_bytes:
        return []
    spare = f", {format_bytes(budget.spare_bytes)} are kept free" if budget.spare_bytes else ""
    limit = f"{format_bytes(budget.nbytes)} at most, {budget.reason}" if budget.nbytes else budget.reason
    return [f"         {limit}", f"steps    take up to {format_bytes(budget.step_bytes)} of the GPU{spare}"]


def _exact(plan: MemoryPlan) -> list[str]:
    if not plan.exact.nbytes:
        return []
    return [f"exact    {format_bytes(plan.exact.nbytes)} of it: {plan.exact} in 16 bits next to the blocks"]


def _reach(plan: MemoryPlan) -> list[str]:
    if plan.attention_window.window is None:
        return []
    held = f"{plan.blocks_per_sequence} blocks per sequence at most, whatever its length"
    return [f"reach    {plan.attention_window} tokens: {held}"]


def choose_model_kv_cache(
    model: DecoderConfig, config: RuntimeConfig, attention_window: AttentionWindow
) -> KVCacheChoice:
    """Chooses the form of a model's keys and values, see `choose_kv_cache`. Raises ToolkitError for one that is asked
    for where no layer keeps any."""
    if model.spec.attentions:
        return choose_kv_cache(model.kv_cache, config, attention_window, model.kv_measured)
    choice = choose_kv_cache(None, config, attention_window)
    if choice.scheme != UNCOMPRESSED:
        raise ToolkitError(f"no layer of this model keeps keys and values as {choice.scheme}", "Leave out --kv-cache")
    return replace(choice, reason="no layer keeps keys and values")


def choose_kv_cache(
    recorded: KVCacheScheme | None,
    config: RuntimeConfig,
    attention_window: AttentionWindow,
    measured: KVCacheRecord | None = None,
) -> KVCacheChoice:
    """The form of keys and values.

    Args:
        recorded: the checkpoint's default.
        attention_window: what tokens attend to. Sinks and recent tokens outside of it need not be exact.
        measured: what forms were measured to cost this checkpoint; one above its limit is warned of.

    Raises:
        SchemeError: an unknown format, or options that mean nothing for it.
    """
    scheme = wished_kv_cache(recorded, config.kv_cache, config.kv_rotate, config.kv_sinks, config.kv_residual_length)
    reason = "as asked for"
    if scheme == (recorded or UNCOMPRESSED):
        reason = "the default" if recorded is None else "the checkpoint's default"
    choice = _within(scheme, attention_window, reason, config.prefix_caching)
    warning = kv_cache_warning(measured, scheme)
    return choice if warning is None else replace(choice, notes=(warning, *choice.notes))


def _within(
    scheme: KVCacheScheme, attention_window: AttentionWindow, reason: str, prefix_caching: bool
) -> KVCacheChoice:
    """Leaves out exact tokens outside of the window, and notes the cost of the others."""
    notes = []
    if attention_window.window is not None and scheme.sinks > attention_window.sinks:
        notes.append(f"{attention_window.sinks} instead of {scheme.sinks} exact sinks: tokens see {attention_window}")
        scheme = replace(scheme, sinks=attention_window.sinks)
    if attention_window.window is not None and scheme.residual_length > attention_window.window:
        notes.append(
            f"{attention_window.window} instead of {scheme.residual_length} exact recent tokens: "
            f"tokens see {attention_window}"
        )
        scheme = replace(scheme, residual_length=attention_window.window)
    if scheme.residual_length and prefix_caching:
        notes.append(
            f"prefix caching is off, and each of several answers computes its prompt: the last "
            f"{scheme.residual_length} tokens are exact for the sequence that computed them only"
        )
    return KVCacheChoice(scheme, reason, tuple(notes))


STATE_SHARE = 2
"""1 / STATE_SHARE of the memory for keys and values is for recurrent states, unless more or less is asked for."""
CPU_BYTES = 512 * 2**20
"""On a CPU, whose memory belongs to others too."""
SPARE_SHARE, LEAST_SPARE_BYTES = 50, 512 * 2**20
"""1 / SPARE_SHARE of a GPU's memory, and LEAST_SPARE_BYTES at least, stay free: allocators round up."""


def find_budget(config: RuntimeConfig, step_bytes: int, free: int | None, share: float = 1.0) -> KVBudget:
    """Memory for keys and values of all layers.

    Args:
        step_bytes: that the largest step takes on a GPU.
        free: of a GPU, after loading the weights; None on a CPU.
        share: of the keys and values that the GPU holds.

    Raises:
        ToolkitError: nothing is left for them.
    """
    beside = 0 if free is None else step_bytes
    if config.num_blocks:
        return replace(NO_BUDGET, step_bytes=beside)
    ranks = config.tensor_parallel_size
    each = f", of {ranks} ranks" if ranks > 1 else ""
    if config.kv_memory_bytes is not None:
        return KVBudget(config.kv_memory_bytes // ranks, f"as asked for{each}", beside)
    if free is None:
        return KVBudget(CPU_BYTES // ranks, f"the default on a CPU{each}")
    spare = max(LEAST_SPARE_BYTES, free // SPARE_SHARE)
    left = int((free - step_bytes - spare) / share)
    if left <= 0:
        raise ToolkitError(
            f"{format_bytes(free)} of the GPU are free after the weights, and steps take {format_bytes(step_bytes)}",
            "Allow fewer --max-num-seqs, use a smaller checkpoint, or say --kv-memory to try how little does",
        )
    reason = f"what steps leave of {format_bytes(free)} after the weights"
    if drafts_with_model(config):
        return KVBudget(left // 2, f"half of {reason}; the other half is the draft model's", step_bytes, spare)
    return KVBudget(left, reason, step_bytes, spare)


def pool_bytes(config: RuntimeConfig) -> int:
    """Returns the bytes of pages and states of the whole model by which stages are compared: those of a CPU's pool."""
    return config.kv_memory_bytes or CPU_BYTES


def drafts_with_model(config: RuntimeConfig) -> bool:
    """Whether draft tokens come from a model, which needs weights and a KV pool of its own."""
    return bool(config.speculative_model) and config.speculative_model not in (CHAINS, TREES, MTP)


def find_model_window(model: DecoderConfig, config: RuntimeConfig) -> AttentionWindow:
    """Attention window of a model. Raises ToolkitError for a window that the model cannot have."""
    if config.attention_window is not None and isinstance(model.spec, CodeSpec):
        raise ToolkitError(
            "an attention window does not fit this model: its own modeling code knows positions up to its context only",
            "Leave out --attention-window",
        )
    if config.attention_window is not None and not model.spec.attentions:
        raise ToolkitError("no layer of this model has attention", "Leave out --attention-window")
    if config.attention_sinks and (reason := model.sinks_unsupported_reason):
        raise ToolkitError(f"attention sinks do not fit this model: {reason}", "Leave out --attention-sinks")
    if config.attention_window is not None and any(model.chunks):
        # A block that slid out of the window would move the places where chunks begin.
        raise ToolkitError(
            f"an attention window does not fit a model with chunks of {max(filter(None, model.chunks))} tokens",
            "Leave out --attention-window",
        )
    return resolve_attention_window(
        model.windows, model.context_length, config.attention_window, config.attention_sinks
    )


def check_fits(plan: MemoryPlan, device: torch.device) -> None:
    """Refuses pools that do not fit in the free memory of the device and the host.

    Raises:
        ToolkitError: with the numbers.
    """
    host, steps = torch.device("cpu"), plan.budget.step_bytes
    wanted = Counter({device: plan.pool_bytes}) + Counter({host: plan.host_bytes})
    for where, size in wanted.items():
        free, beside = available_bytes(where), steps if where == device else 0
        if size + beside > free:
            others = f", of which steps take up to {format_bytes(beside)}" if beside else ""
            room = f"{format_bytes(free)} of free {where.type} memory{others}"
            raise ToolkitError(
                f"KV pages of {format_bytes(size)} do not fit in {room}",
                "Allow less KV memory or fewer blocks",
            )
