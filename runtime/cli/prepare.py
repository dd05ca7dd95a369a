"""`runtime prepare`: writes the weights of a checkpoint in the layout of this machine's kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.locate.hub import HubModel
from runtime.cli.options import ModelArgument, resolve_model
from runtime.cli.start_display import showing
from runtime.core.progress import StartProgress


def prepare(
    *,
    model: ModelArgument = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="Write into the cache folder of this user even if MODEL is writable."),
    ] = False,
    device: Annotated[
        str,
        typer.Option("--device", help="cpu, cuda or cuda:N: the device whose kernels the weights are for."),
    ] = "cpu",
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare all prepared bytes with their digests; write nothing."),
    ] = False,
) -> None:
    """Write the weights of a checkpoint in the layout of this machine's kernels, by default those of the CPU.

    Later starts map the file instead of packing weights, which saves time and the memory of a second copy; for a GPU
    they read it into its memory. The file is written to the folder "prepared" in MODEL, or to the cache folder if MODEL
    is bundled, not writable or of the hub. It is valid for this checkpoint on CPUs with the same instruction set, or on
    any NVIDIA GPU; otherwise, and after changes of the checkpoint, weights are packed at the start. A start compares no
    digests: --check detects corrupted bytes.
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
        in_cache = cache or HubModel.of_cached(path) is not None
        file, linears = prepare_model(path, in_cache, progress, device)
    print(f"prepared  {linears} weights, {file.stat().st_size / 1e6:.1f} MB, in {progress.summary()}")
    print(f"file      {file}")
