"""`runtime warm-up`: compiles the kernels of a model, and exports them to other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from compress.common.cli import with_groups
from runtime.cli.options import ConfigOption, ModelArgument, check_targets, resolve_model, runtime_config
from runtime.cli.start_display import showing
from runtime.core.config import OffloadOptions, SizeOptions, SpeculativeOptions
from runtime.core.progress import StartProgress


@with_groups
def warm_up(
    *,
    model: ModelArgument = None,
    config: ConfigOption = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Pack the compiled kernels into FILE, such as cache.tar.xz."),
    ] = None,
    sizes: SizeOptions,
    drafts: SpeculativeOptions,
    offload: OffloadOptions,
) -> None:
    """Compile all GPU kernels for serving a checkpoint.

    They are stored in Triton's cache folder, where runtime serve with the same options finds them. With --export they
    are also packed into a file for other machines with the same GPU, Triton and toolkit version; see runtime serve
    --jit-cache.
    """
    path, where = resolve_model(model, sizes.trust_remote_code)
    check_targets(export)
    print(f"model     {where}", flush=True)
    settings = runtime_config(sizes, drafts, offload)
    from compress.common.device import resolve_device
    from runtime.backends.triton.kernel_cache import cache_folder, kernel_facts, noting_entries, pack_kernels
    from runtime.llm import load_engine

    facts, progress = kernel_facts(resolve_device(settings.device)), StartProgress()
    with noting_entries() as entries, showing(progress):
        load_engine(path, replace(settings, warm_up=True), progress)
    print(f"ready     in {progress.summary()}")
    print(f"kernels   {len(entries)} in {cache_folder()}: {', '.join(map(' '.join, facts.items()))}")
    if export is None:
        return
    pack_kernels(cache_folder(), export, facts=facts, only=entries)
    print(f"packed    into {export}, {export.stat().st_size / 1e6:.1f} MB")
