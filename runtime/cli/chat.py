"""`runtime chat`: chats with a model in the terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import with_groups
from compress.common.errors import RequestError, ToolkitError
from compress.common.files import utf8_text
from runtime.cli.generate import steps
from runtime.cli.options import ModelArgument, SeedOption, resolve_model, runtime_config
from runtime.core.config import ComputeOptions, ContextOptions, KVCacheOptions, SpeculativeOptions
from runtime.core.request import Delta, FinishReason, SamplingParams, TruncationParams

if TYPE_CHECKING:
    from runtime.core.config import RuntimeConfig
    from runtime.engine.engine import Engine
    from runtime.text.tokenizer import Tokenizer


PROMPT = "> "


@with_groups
def chat(
    *,
    model: ModelArgument = None,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens per answer.")] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.7,
    truncation: TruncationParams,
    seed: SeedOption = None,
    compute: ComputeOptions,
    kv: KVCacheOptions,
    context: ContextOptions,
    drafts: SpeculativeOptions,
) -> None:
    """Chat with a model in the terminal.

    Each line is a message; /help lists commands, Ctrl-C stops an answer, Ctrl-D quits. Answers go to standard output,
    everything else to standard error. Without a terminal, messages are the lines of standard input.
    """
    path, name = resolve_model(model, compute.trust_remote_code)
    sampling = SamplingParams(max_tokens, temperature, seed=seed, **asdict(truncation))
    config = runtime_config(compute, kv, context, drafts)
    tokenizer = open_tokenizer(path)  # rejects a model without a template before loading it
    tell(f"model: {name}")
    talk(load(path, tokenizer, config, sampling, system))


def open_tokenizer(path: Path) -> Tokenizer:
    """Opens the tokenizer. Raises ToolkitError for a model without a chat template."""
    from runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(path)
    if tokenizer.chat_template is None:
        remedy = f"Use runtime generate {path} --prompt TEXT, or put the model's chat_template.jinja into the folder"
        raise ToolkitError(f"{path} has no chat template", remedy)
    return tokenizer


def load(path: Path, tokenizer: Tokenizer, config: RuntimeConfig, sampling: SamplingParams, system: str) -> Session:
    """Loads an engine for one conversation. Imports torch."""
    from runtime.llm import load_engine

    engine, _ = load_engine(path, config)
    return Session(engine, tokenizer, Conversation(sampling, system))


def talk(session: Session) -> None:
    """Handles lines until the user quits."""
    for line in read_lines(session):
        try:
            if line.startswith("/"):
                tell(run_command(session.conversation, line))
            elif line.strip():
                answer(session, line)
        except RequestError as error:
            tell(str(error))


def answer(session: Session, question: str) -> None:
    """Streams one answer. Ctrl-C stops it; the text so far stays part of the conversation."""
    with ctrl_c() as is_pressed:
        for piece in session.ask(question, is_pressed):
            print(piece, end="", flush=True)
        print(flush=True)
        tell(f"[{'stopped; ' if is_pressed() else ''}{session.figures}]")


def read_lines(session: Session) -> Iterator[str]:
    """Yields lines of input, with a prompt and a history on a terminal. Ctrl-C discards the current line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history
        tell("Type a message; /help lists commands.")
    while not session.conversation.is_over:
        try:
            with utf8_text("standard input"):
                line = input(PROMPT if is_terminal else "")
            yield line
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            tell("\n/quit or Ctrl-D quits")


@contextlib.contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Turns Ctrl-C into a flag that is read between steps: an exception in a step would corrupt the engine."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def tell(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


Message = dict[str, str]


@dataclass
class Conversation:
    """User and assistant messages in order, after an optional system message.

    Attributes:
        sampling: sampling parameters of the next answer.
        is_over: whether the user has quit.
    """

    sampling: SamplingParams
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    is_over: bool = False

    @property
    def messages(self) -> list[Message]:
        """Messages in the form of chat templates."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    def with_user(self, text: str) -> list[Message]:
        """Returns the messages with another user message appended."""
        return [*self.messages, {"role": "user", "content": text}]

    def add_turn(self, question: str, answer: str) -> None:
        """Adds a question and its answer, complete or stopped."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, in the form of `/v1/chat/completions`."""
        content = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        path.write_text(content + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the chat.

    Attributes:
        usage: name and argument.
        help: description in one sentence.
        run: function that takes the text after the name and returns a message.
    """

    usage: str
    help: str
    run: Callable[[Conversation, str], str]


def run_command(conversation: Conversation, line: str) -> str:
    """Runs a line that begins with a slash and returns a message.

    Raises:
        RequestError: the command is unknown, or its value is invalid.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise RequestError.unknown("command", name, COMMANDS, "Commands")
    return COMMANDS[name].run(conversation, argument.strip())


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text
    return "system message set" if text else "no system message"


def _temperature(conversation: Conversation, text: str) -> str:
    if text:
        try:
            value = float(text)
        except ValueError as error:
            raise RequestError(
                f"{text!r} is not a temperature", "Write a number, for example /temperature 0.7"
            ) from error
        conversation.sampling = replace(conversation.sampling, temperature=value)
    return f"temperature {conversation.sampling.temperature:g}"


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "conversation cleared" + ("; the system message is kept" if conversation.system else "")


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise RequestError("/save needs a file", "Name one, for example /save chat.json")
    path = Path(name).expanduser()
    try:
        conversation.save(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}", "Name another file") from error
    return f"{len(conversation.messages)} messages in {path}"


def _help(_: Conversation, __: str) -> str:
    return "\n".join(f"{command.usage:18} {command.help}" for command in COMMANDS.values())


def _quit(conversation: Conversation, _: str) -> str:
    conversation.is_over = True
    return ""


COMMANDS = {
    "/system": Command("/system TEXT", "Set the system message; remove it without TEXT.", _system),
    "/temperature": Command("/temperature X", "Set or show the temperature; 0 is greedy.", _temperature),
    "/reset": Command("/reset", "Clear the conversation.", _reset),
    "/save": Command("/save FILE", "Write the conversation as JSON.", _save),
    "/help": Command("/help", "Show this list.", _help),
    "/quit": Command("/quit", "Quit, as Ctrl-D does.", _quit),
    "/exit": Command("/exit", "Quit, as Ctrl-D does.", _quit),
}


@dataclass
class TurnFigures:
    """Metrics of the last answer. Times start at the question."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0
    is_cut: bool = False

    def __str__(self) -> str:
        generating = self.seconds - self.first_seconds
        rate = f", {(self.output_tokens - 1) / generating:.1f} tokens/s" if self.output_tokens > 1 else ""
        prompt = f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached)"
        cut = "; cut off by --max-tokens" if self.is_cut else ""
        return f"{prompt}, {self.output_tokens} generated, first token after {self.first_seconds:.2f} s{rate}{cut}"


class Session:
    """Answers the questions of a conversation.

    Args:
        engine: engine that this session uses exclusively.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, conversation: Conversation) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.conversation = conversation
        self.figures = TurnFigures()

    def ask(self, question: str, is_stopped: Callable[[], bool]) -> Iterator[str]:
        """Yields the answer in pieces. Records the turn and frees the engine, even if the answer is interrupted.

        Args:
            is_stopped: callback after every step; True ends the answer.

        Raises:
            RequestError: the conversation exceeds the context, or the template rejects it; the turn is not recorded.
            ToolkitError: the engine failed; the turn is not recorded.
        """
        token_ids = self.tokenizer.encode_chat(self.conversation.with_user(question))
        began, self.figures = time.perf_counter(), TurnFigures(len(token_ids))
        request_id = self.engine.add_request(token_ids, self._sampling(len(token_ids)))
        pieces: list[str] = []
        try:
            for delta in steps(self.engine, is_stopped):
                self._note(delta, time.perf_counter() - began)
                pieces.append(delta.text)
                yield delta.text
        finally:
            self.engine.abort(request_id)
        self.conversation.add_turn(question, "".join(pieces))

    def _sampling(self, num_prompt_tokens: int) -> SamplingParams:
        room = self.engine.runner.max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"the conversation has {num_prompt_tokens} tokens and the context {self.engine.runner.max_model_len}",
                "Use /reset",
            )
        sampling = self.conversation.sampling
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def _note(self, delta: Delta, seconds: float) -> None:
        figures = self.figures
        if not figures.output_tokens:
            figures.first_seconds = seconds
        figures.seconds = seconds
        figures.output_tokens, figures.cached_tokens = delta.num_output_tokens, delta.num_cached_tokens
        figures.is_cut = delta.finish_reason is FinishReason.LENGTH
