"""Options that several commands share. Imports no torch: help must be instant."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.common.cli import DEMO_NAME, demo_model_path, nearest, option
from compress.common.errors import CheckpointError, RequestError, ToolkitError
from compress.common.files import YamlPart, read_yaml
from runtime.core.config import RuntimeConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from runtime.core.request import Grammar


PACKED = Path("packed")
ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, packed or dense. Without it: the folder 'packed' if there is one, else the bundled "
        "demo model.",
        show_default=False,
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of sampling, for reproducible output.")]


def resolve_model(model: Path | None) -> tuple[Path, str]:
    """Returns the folder to load and its description for the user.

    Raises:
        CheckpointError: the given path is not a folder.
    """
    if model is None and PACKED.is_dir():
        return PACKED, f"{PACKED}/ (the default)"
    if model is None:
        return demo_model_path(), f"{DEMO_NAME} (no model was named and there is no folder '{PACKED}')"
    if not model.is_dir():
        first = "Make it with compress quantize, name" if model == PACKED else "Name"
        remedy = f"{first} a folder with config.json and safetensors files, or leave it out for the bundled demo model"
        raise CheckpointError(f"there is no folder {model}", remedy)
    return model, str(model)


def check_targets(*files: Path | None) -> None:
    """Raises ToolkitError for files that could not be written."""
    for file in files:
        if file is not None and file.is_dir():
            raise ToolkitError(f"{file} is a folder", "Name a file in it")
        if file is not None and not file.absolute().parent.is_dir():
            raise ToolkitError(f"there is no folder {file.parent} for {file.name}", "Make it, or name another file")


def runtime_config(*groups: DataclassInstance) -> RuntimeConfig:
    """Joins groups of options, which are bases of the configuration."""
    return RuntimeConfig(**{name: value for group in groups for name, value in asdict(group).items()})


KEY_VARIABLE = "RUNTIME_API_KEY"


def key_of_environment() -> str | None:
    """Returns the API key of the environment, which other users cannot see in the list of processes."""
    return os.environ.get(KEY_VARIABLE)


def key_option(text: str) -> Any:
    """Declares `--api-key`."""
    text = f"{text} Default: the environment variable {KEY_VARIABLE}, which other users cannot see."
    return typer.Option("--api-key", default_factory=key_of_environment, show_default=False, help=text)


def warn_of_readers(file: Path) -> None:
    """Warns of a file with API keys that other users of this machine may read."""
    if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: other users can read the API keys in {file}; run chmod 600 {file}", file=sys.stderr)


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Makes the values of a YAML file the defaults of a command's options, checked as if they were typed.

    Raises:
        ToolkitError: the file cannot be read, names an unknown option or has a wrong value.
    """
    if file is not None:
        params = {flag.lstrip("-"): param for param in context.command.params for flag in param.opts}
        context.default_map = dict(
            _defaults(context, file, {name: params[name] for name in params if name != "config"})
        )
        if "api_key" in context.default_map:
            warn_of_readers(file)
    return file


def _defaults(context: typer.Context, file: Path, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    root, given = read_yaml(file), set()
    if not isinstance(root.value, dict):
        raise ToolkitError(f"{file} is no mapping", "Write a line 'OPTION: VALUE' for each option, without dashes")
    for key, part in root.value.items():
        name = key.replace("_", "-")
        if name not in params:
            raise ToolkitError(f"{part.place}: unknown option {key!r}", nearest(name, tuple(params), "Options"))
        if name in given:
            raise ToolkitError(f"{part.place}: {name!r} is given twice", "Keep one of them")
        given.add(name)
        yield params[name].name, _value(context, params[name], key, part)


def _value(context: typer.Context, param: Any, key: str, part: YamlPart) -> str | list[str]:
    value: str | list[str]
    if getattr(param, "multiple", False):
        value = [each.text(key) for each in (part.value if isinstance(part.value, list) else [part])]
    else:
        value = part.text(key)
    try:
        param.type_cast_value(context, value)
    except typer.BadParameter as error:
        problem = f"{part.place}: {key}: {error.message}"
        raise ToolkitError(problem, f"See {context.command_path} --help") from error
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="YAML file with options of this command, such as 'max-num-seqs: 64'. The command line overrides it.",
    ),
]


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Address, API keys and model name of a server."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all addresses.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.")] = 8000
    api_key: Annotated[str | None, key_option("API key that clients must send.")] = field(
        default_factory=key_of_environment
    )
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            metavar="FILE",
            help="YAML list of further API keys: name, key, and as limits max_requests, requests_per_minute, "
            "tokens_per_minute. Read again on SIGHUP.",
        ),
    ] = None
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name in the API. Default: the name of the folder.")
    ] = None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Logs of a server."""

    log_level: str = option(
        "--log-level",
        default="info",
        choices=("error", "warning", "info", "debug"),
        help="Least level of log lines on standard error. info: a line per request, except /health and /metrics.",
    )


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """Constraint on the text; at most one of the two."""

    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", metavar="FILE", help="Generate JSON that follows the JSON schema in FILE."),
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="Generate text that this regular expression matches as a whole.")
    ] = None

    def grammar(self) -> Grammar | None:
        """Returns the grammar. Raises RequestError if both are given, or the file cannot be read."""
        from runtime.core.request import Grammar, GrammarKind

        if self.json_schema is not None and self.regex is not None:
            raise RequestError("--json-schema and --regex exclude each other", "Use one of them")
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.json_schema is None:
            return None
        try:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{self.json_schema} cannot be read: {error}", "Name a file with a JSON schema"
            ) from error


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server to measure: a running one, or one that is started for the benchmark."""

    url: Annotated[
        str | None, typer.Option("--url", help="URL of a running server. Default: start one for the benchmark.")
    ] = None
    api_key: Annotated[str | None, key_option("API key of the server.")] = field(default_factory=key_of_environment)
    serve_options: Annotated[
        str, typer.Option("--serve", metavar="OPTIONS", help="Options of the started server, e.g. '--max-num-seqs 16'.")
    ] = ""
