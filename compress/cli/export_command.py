"""The command `compress export`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.gguf.mixes import ALIASES, MIXES, TYPES
from compress.checkpoint.locate import shown_name
from compress.cli.compress_commands import announce, execute, make_request, say
from compress.cli.options import JobOptions, Seed
from compress.common.cli import option, with_groups
from compress.common.errors import RecipeError
from compress.common.files import in_home
from compress.recipe import CalibrationOptions, Recipe

if TYPE_CHECKING:
    from compress.checkpoint.gguf.export import GGUFExport

ROUNDING = "rtn"


@dataclass(frozen=True, slots=True)
class GGUFOptions:
    """Options for GGUF files."""

    gguf_type: str | None = option(
        default=None,
        metavar="MIX",
        help="Mix of types, as llama.cpp's quantizer names it, for dense matrices and codes that no GGUF type "
        f"holds: {', '.join((*MIXES, *ALIASES))}.",
    )
    embedding_type: str | None = option(
        default=None,
        metavar="TYPE",
        help=f"GGUF type of the embedding and the head: {', '.join(TYPES)}. Default: as in llama.cpp's mix, "
        "q6_k for the head and an embedding tied to it.",
    )
    method: str = option(
        default=ROUNDING,
        help="What chooses the codes of --gguf-type: rtn, or a calibrated method such as gptq or gptaq.",
    )


@with_groups
def export(
    *,
    path: Annotated[Path, typer.Argument(help="A packed checkpoint folder; for gguf also a dense one.")],
    format: Annotated[
        str | None,
        typer.Option(help="compressed-tensors, compress-runtime, gptq, awq, fp8, dense, or gguf.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, or file for gguf; must not exist.", show_default=False)
    ] = None,
    list_formats: Annotated[
        bool,
        typer.Option("--list", help="List the formats that can hold it and the engines that load them; write nothing."),
    ] = False,
    gguf: GGUFOptions,
    text: CalibrationOptions,
    seed: Seed = 0,
    job: JobOptions,
) -> None:
    """Convert a packed checkpoint to another format without loss; fails with the reason if that is impossible.

    In GGUF files the embedding and the head are rounded, see --embedding-type. They are also made from dense models:
    --format gguf --gguf-type q4_k_m --method gptq. The options of calibration and runs are those of `compress
    quantize`, and apply with a calibrated --method.
    """
    if list_formats:
        _list_formats(path)
        return
    if format is None or out is None:
        raise RecipeError("an export needs a format and a folder", "Add --format dense --out FOLDER, or --list")
    if gguf.method == ROUNDING and (text, seed, job) != (CalibrationOptions(), 0, JobOptions()):
        raise RecipeError("options of calibration and runs need a calibrated method", "Add --method gptq")
    if format != "gguf":
        if gguf != GGUFOptions():
            raise RecipeError(f"options of GGUF files do not apply to {format}", "Add --format gguf")
        typer.echo("\n".join([*_export_folder(path, format, out), f"wrote {out} ({format})"]))
        return
    exported = _export_gguf(path, in_home(out), gguf, text, seed, job)
    if exported is not None and job.as_json:
        typer.echo(json.dumps(exported.to_dict(), indent=2))
    elif exported is not None:
        typer.echo("\n".join([*exported.lines(), f"wrote {exported.path} ({format})"]))


def _list_formats(path: Path) -> None:
    from compress.checkpoint.containers import containers
    from compress.checkpoint.formats.readers import described
    from compress.checkpoint.gguf.folder import folder_of

    for each in containers(folder_of(path)):
        engines = "; ".join(f"{does} {named}" for does, named in described(each.readers).items())
        typer.echo(f"{each.format}: {f'cannot hold it: {each.refusal}' if each.refusal else engines}")


def _export_folder(path: Path, format: str, out: Path) -> list[str]:
    """Writes a folder and returns notes on inputs that are rounded otherwise than config.json says."""
    from compress.checkpoint.formats.readers import input_notes
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.reader import PackedCheckpoint
    from compress.checkpoint.writer import export_checkpoint
    from compress.common.files import REPORT_FILE
    from compress.reporting.model_card import write_card
    from compress.reporting.report_data import read_report

    source = folder_of(path)
    if (source / REPORT_FILE).is_file():
        read_report(source)  # its figures go into the card: a damaged report is refused before anything is written
    written = export_checkpoint(source, format, out)
    write_card(written, source)
    schemes = PackedCheckpoint.open(written).schemes.values()
    notes = input_notes(schemes)
    if any(scheme.hadamard for scheme in schemes):
        notes.append(
            "transformers loads the copy without the transform_config of its inputs and computes other numbers; call "
            "apply_transform_config of compressed_tensors.transform on the loaded model. vLLM was not tried"
        )
    if inputs := PackedCheckpoint.open(source).describe_inputs():
        notes = [f"inputs keep 16 bits in the copy, where {shown_name(source)} rounds them: {inputs}", *notes]
    return [f"note: {note}" for note in notes]


def _export_gguf(
    path: Path, out: Path, gguf: GGUFOptions, text: CalibrationOptions, seed: int, job: JobOptions
) -> GGUFExport | None:
    """Writes a file; None for the dry run of a calibrated method, whose codes are first written to a folder."""
    from compress.checkpoint.gguf.export import Planner, export_gguf
    from compress.checkpoint.gguf.folder import folder_of
    from compress.common.files import check_out_folder
    from compress.gguf_recipe import stages_of

    source = folder_of(path, values=not job.dry_run, code=job.trust_remote_code)
    if gguf.method == ROUNDING:
        return export_gguf(source, out, gguf.gguf_type, gguf.embedding_type)
    if gguf.gguf_type is None:
        raise RecipeError(f"--method {gguf.method} needs the type of the codes", "Add --gguf-type q4_k_m")
    check_out_folder(out)
    planner = Planner.open(source, gguf.gguf_type, gguf.embedding_type)
    stages = stages_of(planner.chosen_types(), gguf.method)
    codes = out.with_name(f"{out.name}.codes")
    recipe = Recipe(stages, text, seed, f"{gguf.gguf_type}-{gguf.method}")
    context = announce(replace(make_request(path, recipe, codes, job), measure=False), job)
    if context is None:
        return None
    for warning in context.sequences.warnings if context.sequences else ():
        say(f"note: {warning}")  # those of the plan are about engines that load the folder
    execute(context, job.as_json)
    exported = export_gguf(codes, out, gguf.gguf_type, gguf.embedding_type)
    shutil.rmtree(codes)
    return exported
