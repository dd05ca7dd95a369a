"""`runtime chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.errors import RequestError, ToolkitError
from compress.checkpoint.option_groups import with_groups
from runtime.cli.option_groups import (
    ComputeOptions,
    ContextOptions,
    DraftOptions,
    KVOptions,
    TruncationOptions,
    runtime_config,
)
from runtime.cli.options import ModelArgument, SeedOption, resolve_model
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.chat.session import Session
    from runtime.config import RuntimeConfig
    from runtime.text.tokenizer import Tokenizer

PROMPT = "> "


@with_groups
def chat(
    *,
    model: ModelArgument = None,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 0.7,
    truncation: TruncationOptions,
    seed: SeedOption = None,
    compute: ComputeOptions,
    kv: KVOptions,
    context: ContextOptions,
    drafts: DraftOptions,
) -> None:
    """Talk with a model in the terminal.

    Every line is a turn; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves. Answers go to standard output,
    everything else to standard error; without a terminal the turns are the lines of standard input.
    """
    path, name = resolve_model(model)
    sampling = SamplingParams(max_tokens, temperature, seed=seed, **asdict(truncation))
    config = runtime_config(compute, kv, context, drafts)
    tokenizer = open_tokenizer(path)  # refuses a model without a template before the slow part
    tell(f"model: {name}")
    talk(load(path, tokenizer, config, sampling, system))


def open_tokenizer(path: Path) -> Tokenizer:
    """Raises ToolkitError for a model without a chat template."""
    from runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(path)
    if tokenizer.chat_template is None:
        remedy = f"Use runtime generate {path} --prompt TEXT, or put the model's chat_template.jinja into the folder"
        raise ToolkitError(f"{path} has no chat template", remedy)
    return tokenizer


def load(path: Path, tokenizer: Tokenizer, config: RuntimeConfig, sampling: SamplingParams, system: str) -> Session:
    """An engine for one conversation. Imports torch."""
    from runtime.chat.conversation import Conversation
    from runtime.chat.session import Session
    from runtime.llm import load_engine

    engine, _ = load_engine(path, config)
    return Session(engine, tokenizer, Conversation(sampling, system))


def talk(session: Session) -> None:
    """Reads lines until the user leaves."""
    for line in read_lines(session):
        try:
            if line.startswith("/"):
                obey(session, line)
            elif line.strip():
                answer(session, line)
        except RequestError as error:
            tell(str(error))


def obey(session: Session, line: str) -> None:
    from runtime.chat.commands import run_command

    if said := run_command(session.conversation, line):
        tell(said)


def answer(session: Session, question: str) -> None:
    """Streams one answer. Ctrl-C stops it, and what was said until then stays part of the conversation."""
    with ctrl_c() as is_pressed:
        for piece in session.ask(question, is_pressed):
            print(piece, end="", flush=True)
        print(flush=True)
        tell(f"[{'stopped; ' if is_pressed() else ''}{session.figures}]")


def read_lines(session: Session) -> Iterator[str]:
    """Lines of the user, with a prompt and a history on a terminal. Ctrl-C drops a line that is being typed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history
        tell("Say something; /help lists commands.")
    while not session.conversation.is_over:
        try:
            yield input(PROMPT if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            tell("\n/quit or Ctrl-D leaves")


@contextlib.contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Ctrl-C becomes a question to ask between steps: an exception inside of one would leave the engine half done."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
