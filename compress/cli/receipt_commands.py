"""`compress reproduce`: repeats the run of a receipt and compares the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.compress_commands import say
from compress.common.errors import CheckpointError
from compress.common.files import RECEIPT_FILE, in_home

if TYPE_CHECKING:
    from collections.abc import Mapping


def reproduce(
    path: Annotated[Path, typer.Argument(metavar="PACKED", help=f"A checkpoint folder with its {RECEIPT_FILE}.")],
    model: Annotated[Path | None, typer.Option(help="The dense model, where it is not where the receipt says.")] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the second run, removed at the end.")
    ] = None,
) -> None:
    """Repeat the run that made a checkpoint, and compare the hashes of its weight files.

    Files of the dense model are compared first. Relative paths of the recorded command start at the current folder.
    Exits with status 1 where a file differs, and says which inputs or versions do.
    """
    import torch

    from compress.pipeline.receipt import changed_inputs, output_hashes, read_receipt

    recorded = read_receipt(path)
    check_source(recorded, model)
    with TemporaryDirectory(prefix="reproduce-", dir=None if work is None else in_home(work)) as folder:
        out = Path(folder) / path.resolve().name
        # The number of threads decides the order of sums.
        torch.set_num_threads(recorded["environment"]["threads"] * recorded["options"]["workers"])
        _run_again(recorded["command"], out, model)
        again, found = read_receipt(out), output_hashes(out)
    differing = changed_inputs(recorded, again)
    for line in differing:
        say(f"differs: {line}")
    names = sorted({*recorded["outputs"], *found})
    wrong = [name for name in names if recorded["outputs"].get(name) != found.get(name)]
    for name in names:
        typer.echo(f"{name}: {'other bytes' if name in wrong else 'the same bytes'}")
    if wrong:
        raise CheckpointError(f"{len(wrong)} of {len(names)} files of {path} were not reproduced", _cause(differing))


def check_source(recorded: Mapping[str, Any], model: Path | None) -> None:
    """Compares the dense model with the receipt. Raises CheckpointError: it is not there, or its files differ."""
    from compress.checkpoint.gguf.folder import folder_of
    from compress.pipeline.receipt import changed_files

    source = folder_of(model or Path(recorded["source"]["name"]))
    if problems := list(changed_files(recorded["source"]["files"], source)):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"the dense model changed: {problems[0]}{more}", "Name the one of the receipt: --model")


def _cause(differing: Sequence[str]) -> str:
    if differing:
        return f"These inputs differ: {'; '.join(differing[:4])}"
    return "Inputs and versions are those of the receipt: report it with both receipts"


def _run_again(command: Sequence[str], out: Path, model: Path | None) -> None:
    """Runs a recorded command into another folder, without its gate. Raises CheckpointError: it cannot be repeated."""
    from compress.cli import app

    if len(command) < 2:
        raise CheckpointError("the receipt names no command: a script made this checkpoint", "Run that script again")
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group
    if command[1] not in known:
        raise CheckpointError(f"`compress {command[1]}` is not a command that makes checkpoints", "Repeat it by hand")
    context = known[command[1]].make_context(command[1], [*command[2:]])
    context.params |= {"out": out, "gate": "", "as_json": False} | ({} if model is None else {"model": model})
    with redirect_stdout(StringIO()):  # what it says of its folder is not of interest
        context.command.invoke(context)
