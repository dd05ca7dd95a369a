"""The commands `compress quantize`, `prune`, `factorize` and `shrink`, and the execution of recipes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.locate import find_model, source_name
from compress.checkpoint.weights import Int
from compress.cli.options import (
    DEFAULT_OUT,
    EndOptions,
    Gate,
    Ignore,
    JobOptions,
    Model,
    Out,
    Seed,
    check_rounded,
)
from compress.common.cli import DEMO_NAME, demo_model_path, from_written
from compress.common.errors import CheckpointError, RecipeError
from compress.common.files import check_out_folder, in_home
from compress.evaluate.gate import Verdict, measured_for, parse_gate, verdicts
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.base import STAGES, Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage, SchemeKeys, default_method, group_size_from
from compress.stages.shrink import ShrinkStage

if TYPE_CHECKING:
    from compress.pipeline.prepare import RunContext, RunRequest
    from compress.pipeline.run import RunResult


def make_request(
    model: Path | None, recipe: Recipe, out: Path, job: JobOptions, limits: Mapping[str, float] | None = None
) -> RunRequest:
    """Creates the request of a run; uses the demo model, with a message, if none is given. `limits`: of its gate."""
    from compress.checkpoint.gguf.folder import folder_of
    from compress.pipeline.prepare import RunRequest

    if model is None:
        say(f"No model named: using the {DEMO_NAME} ({demo_model_path()})")
    if not job.dry_run:
        check_out_folder(out)  # before a download
    found = find_model(model or demo_model_path(), values=not job.dry_run, code=job.trust_remote_code)
    folder = folder_of(found)
    return RunRequest(
        folder,
        source_name(found),
        recipe,
        in_home(out),
        devices=job.devices,
        dtype=job.dtype,
        restart=not job.resume,
        trust_remote_code=job.trust_remote_code,
        command=shlex.join(["compress", *sys.argv[1:]]),
        figures=measured_for(limits or {}),
    )


def carry_out(model: Path | None, recipe: Recipe, out: Path, job: JobOptions, gate: str) -> None:
    """Plans a run and, unless it is a dry run, executes it. Results go to standard output, progress to standard error.
    Raises ToolkitError: see `compress.pipeline.prepare.prepare` and `compress.pipeline.run`; KeyboardInterrupt: after a
    message about resuming.

    Args:
        model: folder of the dense model; None for the demo model.
        gate: limits in addition to those of the recipe, which they replace.
    """
    from compress.cli.tables import print_result

    limits = {**recipe.gate, **parse_gate(gate)}
    context = announce(make_request(model, recipe, out, job, limits), job)
    if context is None:
        return
    for note in context.notes:
        say(f"note: {note}")
    result = execute(context, job.as_json)
    if job.as_json:
        typer.echo(json.dumps(result.report, indent=2))
    else:
        print_result(context, result)
    keep_gate(limits, result)


def keep_gate(limits: Mapping[str, float], result: RunResult) -> None:
    """Says which limits the finished checkpoint keeps. Raises CheckpointError: it does not keep all of them."""
    found = list(verdicts(limits, result.report))
    refuse_broken(found, str(result.out), "It is written and verified: use it as it is, or compress less")


def refuse_broken(found: Sequence[Verdict], what: str, remedy: str) -> None:
    """Says which limits are kept. Raises CheckpointError: not all of them are."""
    for each in found:
        say(f"gate: {each}: {'kept' if each.is_kept else 'NOT KEPT'}")
    if broken := [str(each) for each in found if not each.is_kept]:
        raise CheckpointError(f"{what} does not keep its gate: {'; '.join(broken)}", remedy)


def announce(request: RunRequest, job: JobOptions) -> RunContext | None:
    """Prepares a run and says what it will do; None for a dry run, whose plan is printed."""
    from compress.cli.tables import describe_run, print_plan
    from compress.pipeline.prepare import prepare
    from compress.pipeline.quality import plan_quality

    context = prepare(request, job.dry_run)
    if job.dry_run and job.as_json:
        typer.echo(json.dumps(context.to_dict() | {"quality_check": plan_quality(context).to_dict()}, indent=2))
    elif job.dry_run:
        print_plan(context)
    if job.dry_run:
        return None
    work = sorted({str(layer_plan) for layer_plan in context.plan.layer_plans.values()})
    stages = ", ".join(stage.label for stage in request.recipe.stages)
    layers = f"{len(context.plan.changed)} linear layers: {', '.join(work)}" if work else stages
    say(f"Compressing {layers}")
    say(describe_run(context))
    return context


def execute(context: RunContext, quiet: bool) -> RunResult:
    """Executes a run. Raises the errors of `carry_out`."""
    from compress.common.files import partial_folder
    from compress.pipeline.run import run

    try:
        return run(context, quiet=quiet)
    except KeyboardInterrupt:
        folder = partial_folder(context.request.out)
        if folder.exists():
            say(f"\nInterrupted. Finished blocks are in {folder}: run the same command again to continue, or add")
            say("--restart to start over.")
        else:
            say("\nInterrupted before anything was written.")
        raise


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _recipe(stages: Sequence[Stage], text: CalibrationOptions, seed: int, name: str) -> Recipe:
    """Returns a recipe of these stages. Raises RecipeError if it is invalid or ignores a given calibration text."""
    recipe = Recipe(tuple(stages), text, seed, name)
    if text.source != CalibrationOptions().source and not recipe.needs_calibration:
        problem = f"no stage of this run uses the calibration text {text.source}"
        raise RecipeError(problem, "Leave --calibration out, or choose another --method")
    return recipe


def with_method(written: Mapping[str, Any], model: Path | None) -> Mapping[str, Any]:
    """Returns the keys of a quantize stage with GPTQ if no method is given and the default one cannot fold scales into
    the norms of this model. Raises CheckpointError: config.json cannot be read or does not define a model."""
    from compress.checkpoint.config import read_config
    from compress.checkpoint.gguf.folder import folder_of
    from compress.models.architecture import smooths_norms
    from compress.models.registry import find_family

    default = default_method(from_written(SchemeKeys, written).form)
    if written["method"] or default != default_method() or model is None:
        return written
    config = read_config(folder_of(model, weights=False))
    describe = find_family(config.get("model_type"))
    if describe is not None and smooths_norms(describe(config)):
        return written
    say(f"{default} cannot smooth model type {config.get('model_type')!r}: using gptq instead (--method overrides)")
    return {**written, "method": "gptq"}


def quantize(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    rounding: Mapping[str, Any],
    ends: EndOptions,
    others: Mapping[str, Any],
    ignore: Ignore = None,
    text: CalibrationOptions,
    seed: Seed = 0,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Quantize a model's linear layers to integers of 2 to 8 bits, or to floats of 4 or 8.

    Processes one block at a time, with little memory. After an interruption the same command resumes and writes the
    same bytes. The result is verified and evaluated, and loads in vLLM, SGLang and transformers.
    """
    stage = QuantizeStage.build(with_method(rounding, model), ignore=tuple(ignore or ()))
    wanted = [(each, others[each.added_by[0]]) for each in STAGES.values() if each.added_by]
    added = [each.build({next(each.written_keys())[0]: value}) for each, value in wanted if value is not None]
    stages, order = [stage, *stage.outside(ends.head_bits, ends.embedding_bits), *added], [*STAGES]
    stages.sort(key=lambda each: order.index(each.name))
    carry_out(model, _recipe(stages, text, seed, "-".join(each.label for each in (stage, *added))), out, job, gate)


def prune(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    pruning: Mapping[str, Any],
    bits: Annotated[
        int | None, typer.Option(help="Quantize the remaining weights to 2 to 8 bits, by GPTQ jointly with pruning.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Input columns that share a scale, with --bits. Default: 128.", show_default=False),
    ] = None,
    ignore: Ignore = None,
    text: CalibrationOptions,
    seed: Seed = 0,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Prune the linear layers of a model; with --bits, also quantize the remaining weights.

    With an N:M pattern zeros are not stored: 2:4 takes 9 bits per weight instead of 16, and 3.1 with --bits 4.
    """
    check_rounded(bits, group_size)
    left_out = tuple(ignore or ())
    stage = PruneStage.build(pruning, ignore=left_out)
    stages: list[Stage] = [stage]
    name = stage.label
    if bits is not None:
        scheme = Int(bits) if group_size is None else Int(bits, group_size_from(group_size))
        stages.append(QuantizeStage("gptq", scheme, ignore=left_out))
        name += f"-int{bits}"
    carry_out(model, _recipe(stages, text, seed, name), out, job, gate)


def factorize(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    factors: Mapping[str, Any],
    bits: Annotated[int | None, typer.Option(help="Quantize both factors to 2 to 8 bits.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Columns of a factor that share a scale, with --bits. Default: -1, one scale per row.",
            show_default=False,
        ),
    ] = None,
    ignore: Ignore = None,
    text: CalibrationOptions,
    seed: Seed = 0,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Replace each linear layer by two low-rank factors; with --bits, also quantize them.

    Both factors are stored, and multiplied one after the other. Layers that would not become smaller stay dense.
    """
    check_rounded(bits, group_size)
    left_out = tuple(ignore or ())
    stage = FactorizeStage.build(factors, ignore=left_out)
    stages: list[Stage] = [stage]
    name = f"{stage.method}-{factors['target_size'] or f'{stage.keep:g}'}"
    if bits is not None:
        rounding = "gptq" if stage.needs_calibration else "rtn"
        scheme = Int(bits, None if group_size is None else group_size_from(group_size))
        stages.append(QuantizeStage(rounding, scheme, ignore=left_out))
        name += f"-int{bits}"
    carry_out(model, _recipe(stages, text, seed, name), out, job, gate)


def shrink(
    *,
    model: Model = None,
    out: Out = Path("shrunk"),
    removed: Mapping[str, Any],
    text: CalibrationOptions,
    seed: Seed = 0,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Remove whole blocks, and heads, MLP channels and experts of all blocks.

    The result is an ordinary dense model with smaller numbers in config.json, which every engine loads and every other
    command takes.
    """
    stage = ShrinkStage.build(removed)
    carry_out(model, _recipe([stage], text, seed, stage.label), out, job, gate)
