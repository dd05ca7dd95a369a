"""`runtime deploy`: many servers of one model."""

from __future__ import annotations

from dataclasses import asdict

import typer

from compress.common.cli import with_groups
from compress.common.errors import ToolkitError
from runtime.cli.options import AddressOptions, ConfigOption, ModelArgument, name_of, resolve_model, runtime_config
from runtime.core.config import LatencyOptions, LimitOptions, OffloadOptions, SizeOptions, SpeculativeOptions
from runtime.deploy.replicas import ReplicaOptions

deploy = typer.Typer(name="deploy", help="Serve a checkpoint by many replicas.", no_args_is_help=True)


@deploy.callback()
def options() -> None:
    """Serve a checkpoint by many replicas."""


@deploy.command()
@with_groups
def ray(
    *,
    model: ModelArgument = None,
    config: ConfigOption = None,
    address: AddressOptions,
    replicas: ReplicaOptions,
    sizes: SizeOptions,
    drafts: SpeculativeOptions,
    offload: OffloadOptions,
    latency: LatencyOptions,
    limits: LimitOptions,
) -> None:
    """Serve a checkpoint by replicas under Ray Serve, in the cluster of this machine or in a new local one.

    Prompts with the same start go to the same replica. Replicas are added while many requests wait.
    """
    path, where = resolve_model(model, sizes.trust_remote_code)
    try:
        from ray import serve

        from runtime.deploy.ray import app
    except ImportError as error:
        raise ToolkitError(f"the package {error.name} is missing", "pip install 'compress-runtime[ray]'") from error
    print(f"model     {where}", flush=True)
    settings = runtime_config(sizes, drafts, offload, latency)
    given = {"name": address.name or name_of(path), "api_key": address.api_key, "api_keys": address.api_keys}
    serve.start(http_options={"host": address.host, "port": address.port})
    limit = asdict(limits)
    serve.run(app({"model": path, "config": settings, "limits": limit, **given, **asdict(replicas)}), blocking=True)
