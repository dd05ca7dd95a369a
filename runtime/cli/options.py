"""Options that several commands share, under the same names everywhere. Free of torch."""

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
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Makes sampling reproducible.")]


def resolve_model(model: Path | None) -> tuple[Path, str]:
    """The folder to load and how to name it to the user, with the reason when none was given.

    Raises:
        CheckpointError: the given path is no folder.
    """
    if model is None and PACKED.is_dir():
        return PACKED, f"{PACKED}/ (found here; no model was named)"
    if model is None:
        return demo_model_path(), f"{DEMO_NAME} (no model was named and there is no folder '{PACKED}')"
    if not model.is_dir():
        first = "Make it with compress quantize, name" if model == PACKED else "Name"
        remedy = f"{first} a folder with config.json and safetensors files, or none to use the bundled demo model"
        raise CheckpointError(f"there is no folder {model}", remedy)
    return model, str(model)


def check_targets(*files: Path | None) -> None:
    """Refuses, before anything runs, files that could not be written in the end."""
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
    """Where clients reach the server, with which key, and by what name they call the model."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that clients must send.")] = None
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name for clients; default: the folder's.")
    ] = None


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """What the text must look like; one of the two at most."""

    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="The text must be JSON of this schema.")
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="The text must be matched by this regular expression, all of it.")
    ] = None

    def grammar(self) -> Grammar | None:
        """What the options say. Raises RequestError when both are given, or the file cannot be read."""
        from runtime.core.request import Grammar, GrammarKind

        if self.json_schema is not None and self.regex is not None:
            raise RequestError("--json-schema and --regex exclude each other", "Give one of them")
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
    """Which server is measured: a running one, or an own one."""

    url: Annotated[
        str | None, typer.Option("--url", help="A running server; without it one is started for the time.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that the server at --url asks for.")] = None
    serve_options: Annotated[
        str, typer.Option("--serve", metavar="OPTIONS", help="For the own server, e.g. '--max-num-seqs 16'.")
    ] = ""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests follow each other."""

    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="Closed loop: so many clients. Default: 8.")
    ] = None
    rate: Annotated[
        float | None, typer.Option("--rate", "-r", min=1e-3, help="Open loop: Poisson arrivals, so many a second.")
    ] = None

    def load(self) -> Load:
        """What the options say. Raises ToolkitError for both at once."""
        from runtime.bench.run import Load

        if self.rate is not None and self.concurrency is not None:
            raise ToolkitError("--rate and --concurrency exclude each other", "Give one: open or closed loop")
        return Load(self.concurrency or DEFAULT_CONCURRENCY, self.rate)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Which requests are sent."""

    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests to measure.")] = 64
    input_lengths: Annotated[
        str, typer.Option("--input", help="Own prompt tokens of a request: 128, or 32:256 for uniform.")
    ] = "32:256"
    output_lengths: Annotated[str, typer.Option("--output", help="Tokens of an answer, exactly: 64, or 32:256.")] = (
        "32:256"
    )
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", min=0, help="Tokens in front of every prompt, the same for all.")
    ] = 0
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSON lines {"prompt": ...} or {"messages": [...]} instead of the manual.'),
    ] = None
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of lengths, texts and arrivals.")] = 0

    def workload(self) -> Workload:
        """What the options say. Raises typer.BadParameter for what is no range of token counts."""
        from runtime.bench.load import Workload

        return Workload(
            parse_lengths("--input", self.input_lengths),
            parse_lengths("--output", self.output_lengths),
            self.requests,
            self.shared_prefix,
            self.temperature,
            self.seed,
        )


def parse_lengths(option: str, text: str) -> Lengths:
    """Raises typer.BadParameter for what is no range of token counts."""
    from runtime.bench.load import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: write tokens as 128, or as 32:256 for uniform") from error
