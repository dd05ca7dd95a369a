"""Helpers of both command lines: errors are printed as one line, Ctrl-C exits with status 130. Does not import
torch."""

from __future__ import annotations

import errno
import functools
import inspect
import operator
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from importlib.resources import files
from io import TextIOWrapper
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_origin, get_type_hints

import typer

from compress.common.errors import RecipeError, ToolkitError, is_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console


Built = TypeVar("Built")
UNSET: Any = object()
LIMITS: Mapping[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "at least": operator.ge,
    "below": operator.lt,
    "at most": operator.le,
}


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option: how users write it, and which values it takes.

    Attributes:
        default: of the field.
        details: arguments of `typer.Option`; `help` may be a function, called when the command line is built.
        name: key in recipes; empty for the name of the field.
        choices: the only values on the command line, listed in its help; empty for any.
        written, start: type and default of a key as it is written; by default those of the field.
        typed: type on the command line; by default `written`. None keeps the option off the command line.
        read: function from a key as it is written to the value of the field; None keeps the value.
        words: the only values that `check_options` accepts; empty for any.
        limits: limits that `check_options` checks, by the words of `LIMITS`.
    """

    flags: tuple[str, ...]
    default: Any
    details: Mapping[str, Any]
    name: str = ""
    choices: tuple[str, ...] = ()
    written: Any = UNSET
    start: Any = UNSET
    typed: Any = UNSET
    read: Callable[[Any], Any] | None = None
    words: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> None:
        """Raises RecipeError for a value outside the words or limits."""
        if self.words and value not in self.words:
            raise RecipeError.unknown(name, value, self.words)
        if not all(LIMITS[word](value, limit) for word, limit in self.limits.items()):
            wanted = " and ".join(f"{word} {limit:g}" for word, limit in self.limits.items())
            remedy = "Leave it out" if self.default is None else f"Use {[*self.flags, name][0]} {self.default}"
            raise RecipeError(f"{name}={value} is not {wanted}", remedy)

    def annotation(self, hint: Any) -> Any:
        """Returns Typer's annotation of a field with this type."""
        kind = hint if self.typed is UNSET else self.typed
        if self.choices:
            kind = _Choice("Choice", {name: name for name in self.choices})  # type: ignore[call-arg]  # functional form
        text = self.details.get("help")
        details = {**self.details, "help": text() if callable(text) else text}
        return Annotated[kind, typer.Option(*self.flags, **details)]


def option(*flags: str, default: Any, **declared: Any) -> Any:
    """Declares a dataclass field that is also an option of the command line, or a key of recipes. `declared`:
    attributes of `Option`, and its `details`."""
    own = {each.name: declared.pop(each.name) for each in fields(Option) if each.name in declared}
    return field(default=default, metadata={"option": Option(flags, default, declared, **own)})


def check_options(values: Any) -> None:
    """Checks a dataclass against the words and limits that its fields declare; None passes. Raises RecipeError."""
    for each in fields(values):
        declared, value = each.metadata.get("option"), getattr(values, each.name)
        if declared and value is not None:
            declared.check(declared.name or each.name, value)


Key = tuple[str, Any, Field[Any]]
"""Name, type and field of an option as users write it."""


def as_written(kind: type[Any], **starts: Any) -> Iterator[Key]:
    """Yields the options of a dataclass as users write them: fields declared with `option`, or annotated with an option
    of Typer; `starts` replace their defaults."""
    hints = get_type_hints(kind, include_extras=True)
    for each in sorted(fields(kind), key=lambda each: bool(each.kw_only)):
        declared, hint = each.metadata.get("option"), hints[each.name]
        if declared:
            start = declared.default if declared.start is UNSET else declared.start
            start = field(default=starts.get(each.name, start), metadata=each.metadata)
            yield declared.name or each.name, hint if declared.written is UNSET else declared.written, start
        elif get_origin(hint) is Annotated:
            yield each.name, hint, each


def from_written(kind: type[Built], written: Mapping[str, Any], **changes: Any) -> Built:
    """Builds a dataclass from its options as users write them; None stands for the default.

    Args:
        written: values by name, of names and types as in `as_written`.
        changes: fields that replace those of the options.
    """
    values: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        declared = each.metadata.get("option") or Option((), None, {})
        if (value := written.get(declared.name or each.name)) is not None:
            values[each.name] = declared.read(value) if declared.read else value
    return kind(**values | changes)


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SIZE = re.compile(rf"(\d{{0,20}}\.?\d{{1,20}})\s*({'|'.join(UNITS)})", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB` or `1000000`. Raises ValueError for anything else."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def size_in_bytes(text: str | int) -> int:
    """Parses `5GB`, `800 MB`, `1.5GiB` or a plain number into bytes. Raises RecipeError for anything else."""
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise RecipeError(f"invalid size {text!r}", "Write a number and a unit: 5GB, 800MB, 1.5GiB") from error


def read_size(text: str | int) -> int:
    """Bytes of `4GiB`; a default is a number already. Raises typer.BadParameter for anything else."""
    try:
        return text if isinstance(text, int) else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


SIZE_OPTION: dict[str, Any] = {"metavar": "SIZE", "parser": read_size, "show_default": False}
"""Details of an option that is typed as `4GiB`."""


INTERRUPTED = 130
WRONG_OPTIONS = 2
"""Typer's status."""
REMEDIES = {
    errno.EMFILE: "Raise the number of open files, for example ulimit -n 4096",
    errno.ENOMEM: "Free memory, or raise its limit (ulimit -v)",
    errno.EAGAIN: "Raise the limits of processes and memory (ulimit -u, ulimit -v)",
    errno.ENOSPC: "Free space, or write to another disk",
    errno.EDQUOT: "Free space, or write to another disk",
    errno.EACCES: "Change its permissions, or name another path",
    errno.EROFS: "Name a path on a writable disk",
}
"""Remedies for system errors that any read or write may raise."""
NO_THREAD = "can't start new thread"
"""Message of Python for a lack of threads."""


def run_cli(app: typer.Typer) -> None:
    """Runs a Typer application and leaves the process; it never returns.

    A ToolkitError, a full disk, a path that the system refuses or a lack of memory or threads becomes one line
    `error: <problem>. <remedy>` on stderr and status 1, wrong options keep Typer's own message and get status 1, too,
    and Ctrl-C becomes status 130. A closed pipe at the other end of stdout becomes status 1 without a message.
    """
    let_threads_sleep()
    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, interrupt)
    _escape_unprintable()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ToolkitError as error:
        _refuse(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
        sys.exit(1)
    except OSError as error:
        if error.errno not in REMEDIES and error.filename is None:
            raise
        remedy = REMEDIES.get(error.errno or 0, "Name another path")
        _refuse(ToolkitError(f"{error.strerror}: {error.filename or 'in this command'}", remedy))
    except (MemoryError, RuntimeError, ImportError) as error:
        if not is_out_of_memory(error) and NO_THREAD not in str(error):
            raise
        said = str(error).partition("\n")[0] or "out of memory"
        _refuse(ToolkitError(said, "Free memory, or raise the limits of memory and processes (ulimit -v, ulimit -u)"))
    except (KeyboardInterrupt, SystemExit) as stop:
        if _came_from_ctrl_c(stop):
            sys.exit(INTERRUPTED)
        if isinstance(stop, SystemExit) and stop.code == WRONG_OPTIONS:
            sys.exit(1)
        raise


def _escape_unprintable() -> None:
    """Lets streams escape characters that their encoding lacks, such as those of a model on an ASCII terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


RESEND_SECONDS = 0.01


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; within an import, leaves the process with status 130 instead: libraries lose its
    exception while they try to import others, as torch does with NumPy in C. Comes again after `report_unraisable`,
    where Python would lose the exception as well."""
    running = [each.f_code for each, _ in walk_stack(frame)]
    if any("importlib._bootstrap" in code.co_filename for code in running):
        os._exit(INTERRUPTED)
    if report_unraisable.__code__ in running:
        _send_again()
    else:
        signal.default_int_handler(number, frame)


def report_unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Sends Ctrl-C again if its exception was raised where Python ignores exceptions, such as in a destructor; prints
    any other exception."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _send_again()
    else:
        sys.__unraisablehook__(lost)


def _send_again() -> None:
    again = threading.Timer(RESEND_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


def _refuse(error: ToolkitError) -> NoReturn:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(1)


def let_threads_sleep() -> None:
    """Makes torch's worker threads sleep while they wait, unless the user's environment says otherwise.

    By default they spin. Next to any other busy thread (a server's event loop, a second process) the spinning one keeps
    the core that the other needs: on two busy cores a matrix product of 8 us took 57 ms. OpenMP reads the variable when
    torch is loaded, so this comes before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _came_from_ctrl_c(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt started this chain: Typer versions wrap it in exits of different status."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def run_coroutine(work: Coroutine[Any, Any, Built]) -> Built:
    """Runs a coroutine in a new event loop.

    Raises:
        KeyboardInterrupt: after Ctrl-C, which cancels the coroutine; asyncio does so only under Python's own handler.
    """
    import asyncio

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return asyncio.run(work)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Lets Ctrl-C wait for the end of the block: in imports of compiled modules it may end the process by an abort."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def with_groups(command: Callable[..., None], **keys: Iterable[Key]) -> Callable[..., None]:
    """Return a command as Typer takes it: each parameter typed with a dataclass becomes its options, in its place.
    Raises ValueError: two options have the same name.

    Args:
        command: its groups need no default: fields bring theirs.
        keys: options in place of a parameter, which gets a mapping of what is typed, by parameter.
    """
    signature = inspect.signature(command, eval_str=True)
    spread = {name: [*_options(each, keys.get(name))] for name, each in signature.parameters.items()}
    annotations: dict[str, Any] = {name: each.annotation for name, each in signature.parameters.items()}
    groups = [name for name, kind in annotations.items() if is_dataclass(kind)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values = {name: each.value if isinstance(each, _Choice) else each for name, each in values.items()}
        typed = {name: {each.name: values.pop(each.name) for each in spread[name]} for name in (*groups, *keys)}
        made = {name: from_written(annotations[name], typed[name]) for name in groups}
        command(**values, **typed | made)

    offered = [option for options in spread.values() for option in options]
    run.__signature__ = signature.replace(parameters=offered)  # type: ignore[attr-defined]  # what Typer reads
    run.__annotations__ = {each.name: each.annotation for each in offered}
    return run


def _options(parameter: inspect.Parameter, keys: Iterable[Key] | None) -> Iterator[inspect.Parameter]:
    if keys is None and not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    for name, hint, each in keys or as_written(parameter.annotation):
        declared = each.metadata.get("option")
        if declared is None or declared.typed is not None:
            hint = declared.annotation(hint) if declared else hint
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


class _Choice(StrEnum):
    """Base of the enumerations that Typer needs for options with choices. Commands get plain strings."""


PLAIN_WIDTH = 120


def wide_console() -> Console:
    """A console as wide as the terminal; files and pipes get `PLAIN_WIDTH` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on a terminal; yields what updates its description, steps done, and steps in all."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda name, done, total: progress.update(task, description=name, completed=done, total=total)


DISTRIBUTION = "compress-runtime"


def tool_version() -> str:
    """Version of this toolkit; `unknown` when it runs from a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{DISTRIBUTION} {tool_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


DEMO_NAME = "bundled demo model"
DEMO_SOURCE = "demo"
BUNDLED = {DEMO_SOURCE: "demo_model", "demo-mixture": "demo_model_mixture"}
"""Folders of the bundled models. Commands and `compression_config.source` name them, because the folders differ from
machine to machine."""


def bundled_model(model: str | Path) -> str | None:
    """Name of the bundled model that is meant; None for a path. A folder of that name comes first."""
    return str(model) if str(model) in BUNDLED and not Path(model).exists() else None


def bundled_path(name: str) -> Path:
    """Folder of a bundled model, a dense Hugging Face checkpoint."""
    return Path(str(files("compress") / BUNDLED[name]))


def demo_model_path() -> Path:
    """Folder of the bundled demo model."""
    return bundled_path(DEMO_SOURCE)


def draft_model_path() -> Path:
    """Folder of the much smaller model with the same tokenizer."""
    return Path(str(files("compress") / "demo_model_draft"))
