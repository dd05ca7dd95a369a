"""Compression run: processes the dense checkpoint block by block, and is resumable after each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibration.statistics import full_float32
from compress.checkpoint.expert_files import join_experts, stacked_names
from compress.checkpoint.verify import StructureReport, is_only_copied
from compress.common.cli import tool_version
from compress.common.errors import CheckpointError, NumericsError, ToolkitError
from compress.common.files import check_space
from compress.methods.owl import BlockShare
from compress.pipeline.block import BlockJob, BlockOutcome, check_finite, read_block
from compress.pipeline.calibration import CalibratedRunner
from compress.pipeline.compress_block import quantize_block
from compress.pipeline.compress_layer import compress_layers
from compress.pipeline.distillation.finished import finish_folder, with_digests
from compress.pipeline.distillation.training import Finish
from compress.pipeline.embed_and_head import head_needs_inputs, quantize_embedding, quantize_head, stored_embedding
from compress.pipeline.finish import (
    KVResult,
    check_checkpoint,
    checkpoint_config,
    choose_default,
    environment,
    full_report,
    kept_weights,
    put_in_place,
    record_activations,
    save_rest,
)
from compress.pipeline.first_pass import finalize_plan
from compress.pipeline.memory import device_peak, forget_device_peak, return_freed_memory
from compress.pipeline.mtp_head import HeadResult, pack_head
from compress.pipeline.prepare import RunContext, source_identity
from compress.pipeline.quality import check_quality, measure_asked
from compress.pipeline.receipt import write_receipt
from compress.pipeline.resume import MTP, Progress, RunDisplay, only_one_run
from compress.pipeline.shrinking.shrink import shrink


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run."""

    out: Path
    structure: StructureReport
    quality: dict[str, Any]
    report: dict[str, Any]
    kv_cache: KVResult | None = None
    mtp: HeadResult | None = None
    finish: Finish | None = None


def run(context: RunContext, quiet: bool = False) -> RunResult:
    """Compresses a model, resuming an earlier run of the same configuration. Raises ToolkitError: the run failed;
    finished blocks are kept, except after numerical errors."""
    started = time.monotonic()
    forget_device_peak(context.workers)
    with only_one_run(context.request.out), full_float32():
        progress = Progress.open(context.request.out, _identity(context), context.request.restart)
        with _cleared_on_failure(progress, context):
            _begin(context, progress, quiet)
            context, shrunk = shrink(context, progress, quiet)
            final, shares = context, list[BlockShare]()
            if context.plan.needs_first_pass:
                plan, shares = finalize_plan(context, progress, quiet)
                final = replace(context, plan=plan)
            folder = _compress(final, progress, quiet)
            peak = device_peak(context.workers)  # of compression only: the measurements afterwards hold whole models
            folder, head = pack_head(final, progress, folder, partial(_assemble, final, progress), quiet)
            folder, finish, trained = finish_folder(final, progress, folder, quiet)
            digests = _digests(context, progress) | trained
            structure = check_checkpoint(context, folder, digests)
            kv_cache = choose_default(final, folder, quiet)
            quality = check_quality(folder, context, progress, digests, quiet)
            record_activations(folder, quality)
            figures = measure_asked(folder, context, quiet)
        seconds = time.monotonic() - started
        # With the original plan: kinds of layers instead of individual layers.
        report = full_report(final, progress, structure, quality, seconds) | {
            "plan": context.to_dict(),
            "shrink": shrunk,
            "layerwise": [each.to_dict() for each in shares],
            "kv_cache": kv_cache.to_dict() if kv_cache else None,
            "mtp": head.to_dict() if head else None,
            "finish": finish.to_dict() if finish else None,
            "peak_device_bytes": peak,
            "figures": figures,
        }
        write_receipt(context, folder)
        report = with_digests(report, trained)
        put_in_place(folder, context.request.out, report)
        progress.discard()
    return RunResult(context.request.out, structure, quality, report, kv_cache, head, finish)


def _compress(context: RunContext, progress: Progress, quiet: bool) -> Path:
    """Compresses embedding, blocks and head, and returns the folder of the assembled checkpoint."""
    progress.pieces.remove(MTP)  # of an interrupted run, which may have rejected it
    quantize_embedding(context, progress)
    _run_blocks(context, progress, quiet)
    quantize_head(context, progress)
    return _assemble(context, progress)


def _assemble(context: RunContext, progress: Progress) -> Path:
    save_rest(context, progress)
    config = checkpoint_config(context, progress)
    return progress.assemble(context.skeleton.num_blocks, config, context.files)


def _identity(context: RunContext) -> dict[str, Any]:
    """Returns everything that determines the packed bytes; runs that differ in it must not share progress."""
    sequences = context.sequences
    return {
        **source_identity(context),
        "recipe": context.request.recipe.to_dict(),
        "tokens_per_channel": context.request.tokens_per_channel,
        "calibration_tokens": sequences.token_sha256 if sequences else None,
        "device": context.device.type,
        "dtype": str(context.dtype),
        "tool": tool_version(),
    }


@contextmanager
def _cleared_on_failure(progress: Progress, context: RunContext) -> Iterator[None]:
    """Keeps finished blocks when a run fails, except damaged ones, and discards them if another run would fail too."""
    try:
        yield
    except ToolkitError as error:
        if isinstance(error, NumericsError) or not progress.has_begun(context.skeleton.num_blocks):
            progress.discard()
        elif isinstance(error, CheckpointError):
            progress.drop_damaged(context.sequences is not None)
        raise


def _begin(context: RunContext, progress: Progress, quiet: bool) -> None:
    """Checks disk space and the finiteness of all weights, before anything is written."""
    if progress.exists:
        return
    check_space(progress.folder, context.disk)
    with RunDisplay(len(context.files.names()), quiet=quiet, unit="tensor") as display:
        for name in context.files.names():
            if is_only_copied(context.files, name):
                continue
            display.step(f"checking {name}")
            check_finite(name, context.files.tensor(name))
            context.files.release()
            display.finish()
    progress.begin()


def _run_blocks(context: RunContext, progress: Progress, quiet: bool) -> None:
    total = context.skeleton.num_blocks
    done = progress.num_finished(total)
    with RunDisplay(total, done, quiet) as display:
        if done:
            display.say(f"continuing after block {done} of {total} (progress in {progress.folder})")
            _note_other_machine(context, progress.facts(done - 1)["environment"], display)
        if done == total:
            return
        embedding = partial(stored_embedding, context, progress)
        is_calibrated = context.sequences is not None and bool(context.plan.changed)
        runner = (
            CalibratedRunner(context, quantize_block, progress, done, display, embedding) if is_calibrated else None
        )
        for index in range(done, total):
            outcome = runner.run(index) if runner else _run_plainly(context, index)
            _save(context, progress, index, outcome, runner)
            display.finish(_line(outcome))
            del outcome
            return_freed_memory()


def _note_other_machine(context: RunContext, before: dict[str, Any], display: RunDisplay) -> None:
    """Prints a note if the machine has changed: another summation order may change the last bits."""
    now = environment(context)
    differing = [f"{key} {before.get(key)}, now {now[key]}" for key in now if before.get(key) != now[key]]
    if differing:
        display.say(f"note: earlier blocks were computed with {'; '.join(differing)}: last bits may differ")


def _run_plainly(context: RunContext, index: int) -> BlockOutcome:
    job = BlockJob.of(context, index)
    block = read_block(context.skeleton, context.files, index, set(job.layer_plans), torch.device("cpu"), None)
    return compress_layers(block, job, context.workers)


def _save(
    context: RunContext,
    progress: Progress,
    index: int,
    outcome: BlockOutcome,
    runner: CalibratedRunner[BlockOutcome] | None,
) -> None:
    micro_batch, passed_on = (runner.micro_batch, runner.passed_on) if runner else (0, {})
    prefix = f"{context.skeleton.block_name(index)}."
    outcome.kept = kept_weights(context, [module for module in context.plan.kept if module.startswith(prefix)])
    facts = outcome.facts() | {"block": context.skeleton.block_name(index), "micro_batch": micro_batch}
    facts["environment"] = environment(context)
    wanted = index + 1 < context.skeleton.num_blocks or head_needs_inputs(context)
    hidden = outcome.hidden if wanted else None
    progress.save_block(index, _stored(context, outcome), facts, hidden, outcome.reference, passed_on)
    context.files.release()


def _stored(context: RunContext, outcome: BlockOutcome) -> dict[str, Tensor]:
    """Returns the tensors of a block; if no expert is packed, experts are stacked as in transformers."""
    tensors = outcome.tensors(context.scale_dtype)
    if stacked_names((f"{module}.weight" for module in outcome.weights | outcome.kept), context.config):
        return tensors
    is_packed = any(each.scheme for each in context.plan.layer_plans.values())
    return join_experts(tensors, context.config, is_packed)


def _digests(context: RunContext, progress: Progress) -> dict[str, str]:
    finished = progress.all_facts(context.skeleton.num_blocks)
    return {module: value for facts in finished for module, value in facts["digests"].items()}


def _line(outcome: BlockOutcome) -> str:
    if not outcome.linears:
        return "unchanged"
    worst = max(outcome.linears, key=lambda record: record.relative_error)
    parts = [f"worst weight error {worst.relative_error:.2e} ({worst.module.rpartition('.')[2]})"]
    if outcome.relative_error is not None:
        parts.insert(0, f"output error {outcome.relative_error:.2e}")
    if outcome.tuning and outcome.tuning.best_step:
        parts.append(f"{1 - outcome.tuning.loss_after / outcome.tuning.loss_before:.0%} less by learning")
    if outcome.smoothing:
        kept = sum(mapping.loss_after < mapping.loss_before for mapping in outcome.smoothing)
        parts.append(f"smoothed {kept}/{len(outcome.smoothing)}")
    parts += [
        f"{each.num_rare} of {len(each.tokens)} experts saw fewer than {each.least} tokens"
        for each in outcome.coverage
        if each.num_rare
    ]
    recovered: dict[str, list[str]] = {}
    for record in outcome.linears:
        recovered.setdefault(record.recovery, []).append(record.module.rpartition(".")[2])
    parts += [f"{' '.join(dict.fromkeys(layers))}: {recovery}" for recovery, layers in recovered.items() if recovery]
    return ", ".join(parts)
