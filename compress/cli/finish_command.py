"""The command `compress finish`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.compress_commands import say
from compress.cli.options import JobOptions, Seed
from compress.common.errors import RecipeError
from compress.common.files import check_out_folder, in_home
from compress.recipe import CalibrationOptions
from compress.stages.finish import FinishStage

if TYPE_CHECKING:
    from compress.evaluate.server import Server


def finish(
    *,
    path: Annotated[Path, typer.Argument(metavar="PACKED", help="A packed checkpoint, of this toolkit or another.")],
    dense: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="MODEL",
            help="Dense model to match, or the address of a running server of it, http://HOST:PORT, which reports the "
            "most likely tokens. Default: the one recorded in the checkpoint.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; must not exist. Default: PACKED-finished.", show_default=False),
    ] = None,
    training: Mapping[str, Any],
    text: CalibrationOptions,
    seed: Seed = 0,
    job: JobOptions,
) -> None:
    """Train scales, norms and biases of a packed checkpoint so that its logits match the dense model's.

    Codes, format and speed stay. Some sequences are withheld from training: the state with the least KL on them is
    written, or the values as they were. After an interruption the same command resumes and writes the same bytes.
    """
    from compress.checkpoint.config import compression_block, read_config
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.locate import find_model
    from compress.pipeline.distillation.run import FinishRequest
    from compress.pipeline.distillation.run import finish as run

    if job.dry_run:
        raise RecipeError("a checkpoint that is finished has no plan to show", "Leave --dry-run out")
    target = check_out_folder(in_home(out or path.with_name(f"{path.name}-finished")))
    packed = folder_of(find_model(path))
    recorded = dense or compression_block(read_config(packed)).get("source")
    if recorded is None:
        raise RecipeError(f"{path} does not say which dense model it was made from", "Name it: --source MODEL")
    request = FinishRequest(
        packed,
        *_find_dense(recorded, job.trust_remote_code),
        FinishStage.build(training),
        text,
        seed,
        target,
        job.devices,
        job.dtype,
        not job.resume,
        job.trust_remote_code,
        shlex.join(["compress", *sys.argv[1:]]),
    )
    result = run(request, job.as_json)
    if job.as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    for note in result.notes:
        say(f"note: {note}")
    say(result.finish.describe())
    if (kl := result.quality.get("kl_mean")) is not None:
        typer.echo(f"KL to the dense model {kl:.5f} ({result.quality['tokens']:,} tokens: a quick check)")
    typer.echo(f"wrote {target}")


def _find_dense(named: str, code: bool) -> tuple[Path | Server, str]:
    """Returns the folder or the server of a dense model, and the name that is recorded. Raises CheckpointError."""
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.locate import find_model, source_name
    from compress.evaluate.server import Server

    if (server := Server.parse(named)) is not None:
        return server, named
    found = find_model(Path(named), code=code)
    return folder_of(found), source_name(found)
