"""Options of `runtime bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.errors import ToolkitError

if TYPE_CHECKING:
    from runtime.benchmark.run import Load
    from runtime.benchmark.workload import Lengths, Workload

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which server is measured: a running one, or an own one."""

    url: Annotated[
        str | None, typer.Option("--url", help="A running server; without it one is started for the time.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that the server at --url asks for.")] = None
    serve_options: Annotated[
        str, typer.Option("--serve", metavar="OPTIONS", help="For the own server, e.g. '--max-sequences 16'.")
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
        from runtime.benchmark.run import Load

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
        from runtime.benchmark.workload import Workload

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
    from runtime.benchmark.workload import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: write tokens as 128, or as 32:256 for uniform") from error
