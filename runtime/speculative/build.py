"""Builds the drafter that `RuntimeConfig.speculative_model` names. Imports torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from compress.checkpoint.gguf.folder import folder_of
from compress.common.cli import draft_model_path
from compress.common.errors import CheckpointError, ToolkitError
from runtime.backends.model import Model
from runtime.core.attention_window import FULL_ATTENTION, NO_KEYS
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import NO_STATES, MemoryPlan, StateSlots
from runtime.memory.estimate import kv_token_bytes
from runtime.memory.plan import check_fits
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.model.mtp import load_head
from runtime.runner.runner import ModelRunner
from runtime.runner.warm_up import warm_up
from runtime.speculative.draft_model import OTHER_NOISE, ModelDrafter, round_layers, skip_layers
from runtime.speculative.mtp import HeadRunner, MtpDrafter, draft_blocks
from runtime.speculative.ngram import CHAINS, MTP, TREE_BRANCHES, TREES, NgramDrafter
from runtime.speculative.proposer import Drafter, Gate, Speculator
from runtime.speculative.verify import Proposals, ProposalSampler, RejectionSampler
from runtime.text.tokenizer import Tokenizer

MAX_DRAFT_TOKENS = 16
CHOICES = "ngram, ngram-tree, mtp, self:2bit, self:3bit, self:skip, self:skip=N, demo, a folder or ORG/NAME"
SELF_ROUNDED = re.compile(r"self:([23])bit")
SELF_SKIPPING = re.compile(r"self:skip(?:=(\d+))?")


def build_speculator(path: str | Path, target: Model, runner: ModelRunner, config: RuntimeConfig) -> Speculator | None:
    """Builds the `Speculator` for the engine of `runner`; None without a drafter in the configuration.

    With `spec_verify="rejection"` the runner's sampler is replaced by one that verifies by rejection.

    Args:
        path: the target's folder.

    Raises:
        ToolkitError: an unknown drafter, a draft model with another vocabulary, or no memory for its blocks.
    """
    if not config.speculative_model:
        if config.spec_verify == "rejection":
            raise ToolkitError("--spec-verify rejection needs a drafter", "Add --speculative-model ngram")
        return None
    _check(config, runner)
    proposals: Proposals | None = {} if config.spec_verify == "rejection" else None
    drafter = _build_drafter(path, target, runner, config, proposals)
    if proposals is None:
        return Speculator(drafter, config.num_speculative_tokens, Gate())
    runner.sample = RejectionSampler(proposals)
    return Speculator(drafter, config.num_speculative_tokens, Gate(), before=proposals.clear)


def _check(config: RuntimeConfig, runner: ModelRunner) -> None:
    if not 1 <= config.num_speculative_tokens <= MAX_DRAFT_TOKENS:
        raise ToolkitError(
            f"{config.num_speculative_tokens} draft tokens are not between 1 and {MAX_DRAFT_TOKENS}",
            "Use --num-speculative-tokens 4",
        )
    if config.spec_verify not in ("exact", "rejection"):
        raise ToolkitError(f"unknown --spec-verify {config.spec_verify!r}", "Use --spec-verify exact or rejection")
    if config.speculative_model == TREES:
        _check_trees(config, runner)


def _check_trees(config: RuntimeConfig, runner: ModelRunner) -> None:
    remedy = "Use --speculative-model ngram"
    if config.spec_verify == "rejection":
        raise ToolkitError("trees of draft tokens are verified exactly", f"Use --spec-verify exact, or {remedy[4:]}")
    if runner.cache.sinks or runner.cache.residual_window:
        raise ToolkitError("trees of draft tokens cannot be combined with exact sinks and recent tokens", remedy)
    if any(mixer.chunk is not None for mixer in runner.decoder.config.spec.attentions):
        raise ToolkitError("trees of draft tokens cannot be combined with chunks of tokens", remedy)
    if runner.decoder.config.state_fields:
        raise ToolkitError("trees of draft tokens cannot be combined with recurrent layers", remedy)
    shortest = min((window for window in runner.kernels.windows if window is not None), default=None)
    if shortest is not None and shortest <= config.num_speculative_tokens:
        raise ToolkitError(
            f"trees of {config.num_speculative_tokens} tokens do not fit in a window of {shortest}", remedy
        )


def _build_drafter(
    path: str | Path, target: Model, runner: ModelRunner, config: RuntimeConfig, proposals: Proposals | None
) -> Drafter:
    if config.speculative_model == CHAINS:
        return NgramDrafter()
    if config.speculative_model == TREES:
        return NgramDrafter(TREE_BRANCHES)
    if config.speculative_model == MTP:
        return _build_head(path, target, runner, config, proposals)
    decoder = _draft_decoder(path, target, config)
    memory = _draft_memory(decoder, target, runner.memory)
    decoder = decoder.for_length(min(config.max_model_len or 0, decoder.config.context_length))
    draft = ModelRunner(decoder, memory)
    if config.warm_up and decoder.device.type == "cuda":
        warm_up(draft, replace(config, captures_later=False))
    if proposals is not None:
        draft.sample = ProposalSampler(proposals)
    return ModelDrafter(draft, config, same_noise=proposals is None)


def _build_head(
    path: str | Path, target: Model, runner: ModelRunner, config: RuntimeConfig, proposals: Proposals | None
) -> MtpDrafter:
    """Builds the drafter of the checkpoint's own head, which reads every step of `runner` from now on."""
    if not isinstance(target, Decoder):
        raise ToolkitError("models that run by their own modeling code draft with no head", "Use another drafter")
    if runner.attention_window.window is not None:
        raise ToolkitError(
            "a head of multi-token prediction cannot be combined with --attention-window",
            "Use --speculative-model ngram",
        )
    head = load_head(path, target, config.linear_backend)
    head = replace(head, decoder=head.decoder.for_length(min(config.max_model_len or 0, target.config.context_length)))
    each = draft_blocks(config.num_speculative_tokens, runner.block_size)
    num_blocks = runner.num_blocks + each * max(1, runner.memory.num_sequences)
    memory = _draft_memory(head.decoder, target, replace(runner.memory, num_blocks=num_blocks))
    memory = replace(memory, num_host_blocks=runner.num_host_blocks)
    noise = 0 if proposals is None else OTHER_NOISE
    drafter = MtpDrafter(HeadRunner(head, memory), runner.num_blocks, each, noise=noise)
    if proposals is not None:
        drafter.sample = ProposalSampler(proposals)
    runner.hand_to(drafter)
    return drafter


def _draft_decoder(path: str | Path, target: Model, config: RuntimeConfig) -> Model:
    if config.speculative_model.startswith("self:") and not isinstance(target, Decoder):
        raise ToolkitError(
            f"{config.speculative_model} needs the layers of the model, and its own modeling code computes them",
            "Use --speculative-model ngram",
        )
    if isinstance(target, Decoder) and (rounded := SELF_ROUNDED.fullmatch(config.speculative_model)):
        return round_layers(target, path, int(rounded[1]), config.linear_backend)
    if isinstance(target, Decoder) and (skipping := SELF_SKIPPING.fullmatch(config.speculative_model)):
        return skip_layers(target, int(skipping[1]) if skipping[1] else None)
    try:
        folder = draft_model_path() if config.speculative_model == "demo" else folder_of(config.speculative_model)
    except CheckpointError as error:
        problem = f"--speculative-model {config.speculative_model} is not a known drafter, and {error.problem}"
        raise ToolkitError(problem, f"{error.remedy}, or use {CHOICES}") from error
    decoder = load_model(folder, device=str(target.device), dtype=_dtype_name(target), kernels=config.linear_backend)
    _check_vocabulary(Path(path), target, folder, decoder)
    return decoder


def _dtype_name(target: Model) -> str:
    return str(target.dtype).removeprefix("torch.")


def _check_vocabulary(path: Path, target: Model, folder: Path, draft: Model) -> None:
    """Raises ToolkitError unless token ids mean the same to both models."""
    remedy = "Draft with a model of the same family, or with --speculative-model ngram or self:2bit"
    sizes = target.config.spec.vocab_size, draft.config.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise ToolkitError(f"{folder} has a vocabulary of {sizes[1]} tokens, and {path} one of {sizes[0]}", remedy)
    different = Tokenizer.open(path).count_differences(Tokenizer.open(folder))
    if different:
        raise ToolkitError(
            f"the tokenizers of {folder} and {path} disagree about {different} of {sizes[0]} token ids", remedy
        )


def _draft_states(decoder: Model, memory: MemoryPlan) -> StateSlots:
    """Plans two slots for each sequence that runs at the same time."""
    slot_bytes = decoder.config.state_bytes(decoder.dtype.itemsize)
    num_running = memory.num_sequences
    if memory.states.num_slots:
        num_running = min(num_running, memory.states.max_running)
    return StateSlots(2 * num_running, slot_bytes) if slot_bytes else NO_STATES


def _draft_memory(decoder: Model, target: Model, memory: MemoryPlan) -> MemoryPlan:
    """Plans as many pages as the target has, in the target's format, without exact sinks and recent tokens."""
    model, choice = decoder.config, memory.kv_choice
    choice = replace(choice, scheme=replace(choice.scheme, sinks=0, residual_length=0), notes=())
    token_bytes = kv_token_bytes(model, choice.scheme, decoder.dtype.itemsize)
    shared = isinstance(target, Decoder) and isinstance(decoder, Decoder) and decoder.embedding is target.embedding
    weight_bytes = 0 if shared else decoder.nbytes
    longest = min(memory.max_model_len, model.context_length)
    plan = MemoryPlan(
        weight_bytes,
        token_bytes,
        memory.block_size,
        memory.num_blocks,
        longest,
        "as the target",
        blocks_per_sequence=-(-longest // memory.block_size),
        kv_choice=choice,
        num_sequences=memory.num_sequences,
        states=_draft_states(decoder, memory),
        reach=FULL_ATTENTION if token_bytes else NO_KEYS,
    )
    check_fits(plan, decoder.device)
    return plan
