"""`runtime prepare`: writes the weights of a checkpoint as the kernels of this machine read them."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.options import ModelArgument, resolve_model
from runtime.cli.start_display import showing
from runtime.core.progress import StartProgress


def prepare(
    *,
    model: ModelArgument = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="Write into the cache folder of this user, also where MODEL can be written to."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare all bytes of what was prepared with their digests, and write nothing."),
    ] = False,
) -> None:
    """Write the weights of a checkpoint as this machine's CPU kernels read them.

    Later starts map the file in place of packing weights: they take less time, and the memory of one copy. It goes
    into the folder prepared of MODEL, or into the cache folder where MODEL cannot be written to. It serves this
    checkpoint on CPUs with the same instruction set; elsewhere, and after changes, weights are packed as before.
    Starts do not read it whole: --check finds bytes that a disk changed.
    """
    path, where = resolve_model(model)
    print(f"model     {where}", flush=True)
    from runtime.model.prepare import check_prepared_files, prepare_model

    if check:
        for file, linears in check_prepared_files(path):
            print(f"checked   {linears} weights, {file.stat().st_size / 1e6:.1f} MB: as they were written")
            print(f"file      {file}")
        return
    progress = StartProgress()
    with showing(progress):
        file, linears = prepare_model(path, in_cache=cache, report=progress)
    print(f"prepared  {linears} weights, {file.stat().st_size / 1e6:.1f} MB, in {progress.summary()}")
    print(f"file      {file}")
