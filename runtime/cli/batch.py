"""`runtime batch`: answers a file of requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import run_coroutine, with_groups
from compress.common.errors import DataError, ToolkitError
from runtime.cli.options import check_targets, name_of, resolve_model, runtime_config
from runtime.core.config import SeedOptions, SizeOptions, SpeculativeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from runtime.cli.batch_file import Batch, Progress, ResultFile
    from runtime.core.config import RuntimeConfig


MAX_PROBLEMS_SHOWN = 20
WAITING = 16
"""Queued requests beyond the batch, which keep the engine busy."""
PATIENCE = 1e9
"""Timeout in seconds; effectively no limit."""


@with_groups
def batch(
    *,
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="File of requests in OpenAI's batch format, one JSON object per line.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to append answers to, in order of completion.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint folder. Default: 'packed' if it exists, else the bundled demo model."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="Model name in the requests. Default: the name of the folder."),
    ] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", help="File for answers with a status other than 200. Default: OUT.")
    ] = None,
    sizes: SizeOptions,
    drafts: SpeculativeOptions,
    seed: SeedOptions,
) -> None:
    """Answer a file of requests without a server.

    IN has lines {"custom_id", "method": "POST", "url", "body"} for /v1/chat/completions, /v1/completions and
    /v1/embeddings; OUT receives lines {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}
    in order of completion. Requests are validated and answered as by `runtime serve`. After Ctrl-C or a crash, run the
    same command again to answer the requests that are missing in OUT and --errors; remove a line there to repeat its
    request. Exits with status 1 if a request failed.
    """
    from runtime.cli.batch_file import Batch, Progress

    path, where = resolve_model(model, sizes.trust_remote_code)
    served_name = name or name_of(path)
    custom_ids = check(source, served_name)
    check_targets(out, errors)
    config = runtime_config(sizes, drafts, seed)
    with result_files(out, errors) as files:
        plan = Batch(source, served_name, files[0], files[-1], num_at_once=sizes.max_num_seqs + WAITING)
        num_pending = sum(not plan.is_done(custom_id) for custom_id in custom_ids)
        if num_pending:
            print(f"model: {where}", file=sys.stderr)
            app = load(path, served_name, config)
            run(app, plan, Progress(len(custom_ids), len(custom_ids) - num_pending))
        report(files, custom_ids)


@contextmanager
def result_files(out: Path, errors: Path | None) -> Iterator[list[ResultFile]]:
    """Opens the result files: one, or one for successes and one for failures."""
    from runtime.cli.batch_file import ResultFile

    paths = [out] if errors is None or errors == out else [out, errors]
    with ExitStack() as stack:
        yield [stack.enter_context(closing(ResultFile(path))) for path in paths]


def load(path: Path, name: str, config: RuntimeConfig) -> FastAPI:
    """Loads the application that `runtime serve` serves, without limits on queue and time."""
    from runtime.core.config import Limits
    from runtime.core.progress import ignore
    from runtime.served_engine import EngineSource, LoadingHere
    from runtime.server.app import create_app

    served = LoadingHere(EngineSource(path, config)).finish(ignore)
    limits = Limits(
        max_model_len=served.facts.max_model_len,
        max_requests=sys.maxsize,
        max_body_bytes=sys.maxsize,
        queue_seconds=PATIENCE,
        request_seconds=PATIENCE,
        client_seconds=PATIENCE,
    )
    return create_app(served.client, served.tokenizer, name, limits)


def run(app: FastAPI, plan: Batch, progress: Progress) -> None:
    """Answers the pending requests. Ctrl-C stops between two lines of results."""
    from runtime.cli.batch_file import answer_all

    try:
        run_coroutine(answer_all(app, plan, progress))
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        raise
    finally:
        progress.close()


def report(files: list[ResultFile], custom_ids: list[str]) -> None:
    """Prints the result file. Raises ToolkitError if requests failed."""
    from runtime.cli.batch_file import OK

    print(f"answers   {files[0].path}")
    statuses = {name: status for file in files for name, status in file.statuses.items()}
    failed = sum(statuses[custom_id] != OK for custom_id in custom_ids)
    if failed:
        raise ToolkitError(f"{failed} of {len(custom_ids)} requests failed", f"See {files[-1].path} for the reasons")


def check(source: Path, name: str) -> list[str]:
    """Validates a file and returns its custom ids. Prints every invalid line to standard error.

    Raises:
        DataError: the file cannot be read, is empty, or has an invalid line.
    """
    from runtime.cli.batch_file import Line, read_lines

    lines = list(read_lines(source, name))
    problems = [line for line in lines if isinstance(line, str)]
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        print(problem, file=sys.stderr)
    if problems:
        raise DataError(
            f"{len(problems)} of {len(lines)} lines of {source} are invalid", "Correct them; nothing was run"
        )
    if not lines:
        raise DataError(f"{source} has no requests", "Write one JSON object per line")
    return [line.custom_id for line in lines if isinstance(line, Line)]
