"""Options that several commands share. Imports no torch: help must be instant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import DEMO_NAME, demo_model_path
from compress.common.errors import CheckpointError, RequestError, ToolkitError
from runtime.core.config import RuntimeConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from runtime.bench.load import Lengths, Workload
    from runtime.bench.run import Load
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


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Address, API key and model name of a server."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all addresses.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.")] = 8000
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key that clients must send.")] = None
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name in the API. Default: the name of the folder.")
    ] = None


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


DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server to measure: a running one, or one that is started for the benchmark."""

    url: Annotated[
        str | None, typer.Option("--url", help="URL of a running server. Default: start one for the benchmark.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key of the server at --url.")] = None
    serve_options: Annotated[
        str, typer.Option("--serve", metavar="OPTIONS", help="Options of the started server, e.g. '--max-num-seqs 16'.")
    ] = ""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Arrival of requests."""

    concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            "-c",
            min=1,
            help="Closed loop: number of clients that wait for their answers. Default: 8.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option("--request-rate", "-r", min=1e-3, help="Open loop: requests per second, with Poisson arrivals."),
    ] = None

    def load(self) -> Load:
        """Returns the load. Raises ToolkitError if both options are given."""
        from runtime.bench.run import Load

        if self.rate is not None and self.concurrency is not None:
            raise ToolkitError(
                "--request-rate and --max-concurrency exclude each other", "Use one: open or closed loop"
            )
        return Load(self.concurrency or DEFAULT_CONCURRENCY, self.rate)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Requests of the benchmark."""

    requests: Annotated[int, typer.Option("--num-prompts", "-n", min=1, help="Number of measured requests.")] = 64
    input_lengths: Annotated[
        str,
        typer.Option(
            "--input-len", help="Prompt tokens after the shared prefix: 128, or 32:256 for a uniform distribution."
        ),
    ] = "32:256"
    output_lengths: Annotated[str, typer.Option("--output-len", help="Output tokens: 64, or 32:256.")] = "32:256"
    shared_prefix: Annotated[
        int, typer.Option("--prefix-len", min=0, help="Tokens at the start of every prompt, the same for all.")
    ] = 0
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='File of prompts, in lines {"prompt": ...} or {"messages": [...]}. Default: the Python manual.',
        ),
    ] = None
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of lengths, texts and arrivals.")] = 0

    def workload(self) -> Workload:
        """Returns the workload. Raises typer.BadParameter for an invalid range of token counts."""
        from runtime.bench.load import Workload

        return Workload(
            parse_lengths("--input-len", self.input_lengths),
            parse_lengths("--output-len", self.output_lengths),
            self.requests,
            self.shared_prefix,
            self.temperature,
            self.seed,
        )


def parse_lengths(option: str, text: str) -> Lengths:
    """Parses a range. Raises typer.BadParameter if it is invalid."""
    from runtime.bench.load import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: write tokens as 128, or as 32:256 for uniform") from error
