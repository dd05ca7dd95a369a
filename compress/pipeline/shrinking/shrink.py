"""The shrink stage of a run: chooses what leaves the source, resumably, and gives the run what stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from compress.make_plan import make_plan
from compress.pipeline.calibration import CalibratedRunner
from compress.pipeline.distillation.finished import open_model
from compress.pipeline.memory import return_freed_memory
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import Progress, RunDisplay
from compress.pipeline.shrinking.depth import Sample
from compress.pipeline.shrinking.width import NarrowBlock, Narrowing
from compress.pipeline.smaller_source import KINDS, Kept, SmallerSource
from compress.stages.shrink import ShrinkStage

BLOCKS = "shrink-blocks"


def shrink(context: RunContext, progress: Progress, quiet: bool) -> tuple[RunContext, dict[str, Any] | None]:
    """Chooses what leaves, continuing from what an earlier process chose. Raises ToolkitError. Returns the run on what
    stays, and the choice for the report; without such a stage the same run and None."""
    stage, dense = context.request.recipe.find(ShrinkStage), context.dense
    if stage is None or dense is None:
        return context, None
    steps = _choose_blocks(context, stage, dense, progress, quiet) if stage.blocks else []
    removed = {step["removed"] for step in steps}
    short = dense.with_blocks([index for index in range(dense.skeleton.num_blocks) if index not in removed])
    narrowed, units = _narrow(_on(context, short), stage, short, progress, quiet)
    return _on(context, narrowed), {"stage": stage.to_dict(), "blocks": steps, "units": units}


def _on(context: RunContext, source: SmallerSource) -> RunContext:
    """Returns the run on another source."""
    plan = make_plan(source.skeleton, source.files, context.request.recipe, context.plan.scale_dtype)
    plan = replace(plan, notes=context.plan.notes, removed_bytes=source.removed_bytes)
    return replace(context, files=source.files, config=source.config, skeleton=source.skeleton, plan=plan)


def _choose_blocks(
    context: RunContext, stage: ShrinkStage, dense: SmallerSource, progress: Progress, quiet: bool
) -> list[dict[str, Any]]:
    """Returns the blocks that leave, one after the other, with the score of every candidate at that time."""
    steps = progress.pieces.read_metadata(BLOCKS)["steps"] if progress.pieces.has(BLOCKS) else []
    if len(steps) == stage.blocks:
        return list(steps)
    blocks = [index for index in range(dense.skeleton.num_blocks) if index not in {each["removed"] for each in steps}]
    with RunDisplay(stage.blocks, len(steps), quiet, unit="removed block") as display:
        display.step("logits of the dense model")
        request = context.request
        model = open_model(request.model, context.device, context.dtype, request.trust_remote_code)
        sample = Sample.of(model, context.tokens, context.micro_batch)
        influences = sample.influences() if stage.block_score == "influence" else {}
        targets = [] if influences else sample.targets()
        while len(steps) < stage.blocks:
            candidates = [*dense.removable(blocks, blocks)]
            scores = influences or sample.divergences(
                blocks, candidates, targets, lambda share: display.step("without each block", share)
            )
            removed = min(candidates, key=lambda index: scores[index])
            blocks.remove(removed)
            steps.append({"removed": removed, "scores": {str(each): scores[each] for each in candidates}})
            progress.pieces.write(BLOCKS, {"removed": torch.tensor(removed)}, {"steps": steps})
            display.finish(f"{dense.skeleton.block_name(removed)} ({stage.block_score} {scores[removed]:.5f})")
    return list(steps)


def _narrow(
    context: RunContext, stage: ShrinkStage, source: SmallerSource, progress: Progress, quiet: bool
) -> tuple[SmallerSource, list[dict[str, Any]]]:
    """Returns the source without the units that leave, and the records of all blocks."""
    numbers = {kind: source.num_kept(stage, kind) for kind in KINDS}
    if not any(numbers.values()):
        return source, []
    progress, total = replace(progress, phase="shrink"), source.skeleton.num_blocks
    done = progress.num_finished(total)
    with RunDisplay(total, done, quiet, unit="narrowed block") as display:
        work = Narrowing(source.files, source.spec, numbers, stage.refit)
        runner = CalibratedRunner(context, work, progress, done, display)
        for index in range(done, total):
            found = runner.run(index)
            facts = {"records": found.records, "micro_batch": runner.micro_batch}
            hidden = None if index + 1 == total else found.hidden
            progress.save_block(index, found.tensors, facts, hidden, passed_on=runner.passed_on)
            display.finish(_line(found))
            return_freed_memory()
    records = [progress.facts(index)["records"] for index in range(total)]
    return source.with_units([_read(progress, index) for index in range(total)]), records


def _read(progress: Progress, index: int) -> Mapping[str, Kept]:
    piece, units = progress.piece(index), ".units"
    kinds = [name.removesuffix(units) for name in piece.entries if name.endswith(units)]
    weights = {kind: partial(piece.tensor, name) for kind in kinds if (name := f"{kind}.weight") in piece.entries}
    return {kind: Kept(piece.tensor(kind + units), weights.get(kind)) for kind in kinds}


def _line(found: NarrowBlock) -> str:
    parts = []
    for kind, facts in found.records.items():
        error = f" (output error {facts['relative_error']:.2e})" if "relative_error" in facts else ""
        parts.append(f"{len(facts['removed'])} {kind} removed{error}")
    return ", ".join(parts) or "unchanged"
