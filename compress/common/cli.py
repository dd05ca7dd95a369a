"""Helpers of both command lines: errors are printed as one line, Ctrl-C exits with status 130. Does not import
torch."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from importlib.resources import files
from io import TextIOWrapper
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer

from compress.common.errors import ToolkitError

if TYPE_CHECKING:
    from rich.console import Console


def option(*flags: str, default: Any, choices: tuple[str, ...] = (), **details: Any) -> Any:
    """Declares a dataclass field that is also an option of the command line.

    Args:
        flags: as they are typed, such as `--kv-memory`.
        choices: the only values; empty for any.
        details: arguments of `typer.Option`.
    """
    return field(default=default, metadata={"option": typer.Option(*flags, **details), "choices": choices})


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SIZE = re.compile(rf"(\d{{0,20}}\.?\d{{1,20}})\s*({'|'.join(UNITS)})", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB` or `1000000`. Raises ValueError for anything else."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[match[2].lower()])


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
SHORTAGES = ("allocate memory", "out of memory", "failed to map segment", "can't start new thread")
"""Parts of the messages of torch, the linker and Python for a lack of memory or threads."""


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
        if not isinstance(error, MemoryError) and not any(mark in str(error) for mark in SHORTAGES):
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

    By default they spin. Beside any other busy thread (a server's event loop, a second process) the spinning one keeps
    the core that the other needs: on two busy cores a matrix product of 8 us took 57 ms. OpenMP reads the variable when
    torch is loaded, so this comes before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _came_from_ctrl_c(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt started this chain: Typer versions wrap it in exits of different status."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


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


def with_groups(command: Callable[..., None], **classes: type) -> Callable[..., None]:
    """Return a command as Typer takes it: each parameter typed with a dataclass becomes one option per field, in its
    place.

    Args:
        command: its groups need no default; their fields are declared with `compress.common.cli.option`, or
            annotated with an option of Typer or the text of its help, and bring their defaults.
        classes: dataclasses to take in place of the annotations, by parameter.

    Raises:
        ValueError: two options have the same name.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        each.replace(annotation=classes.get(each.name, each.annotation)) for each in signature.parameters.values()
    ]
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    spread = [option for each in parameters for option in _options(each)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values = {name: each.value if isinstance(each, _Choice) else each for name, each in values.items()}
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **made)

    run.__signature__ = signature.replace(parameters=spread)  # type: ignore[attr-defined]  # what Typer reads
    run.__annotations__ = {option.name: option.annotation for option in spread}
    return run


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    group = parameter.annotation
    if not is_dataclass(group):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        hint = _annotation(hints[each.name], each)
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


class _Choice(StrEnum):
    """Base of the enumerations that Typer needs for options with choices. Commands get plain strings."""


def _annotation(hint: Any, each: Field[Any]) -> Any:
    """Typer's annotation of a field that declares an option, or whose annotation holds the text of its help."""
    if "option" in each.metadata:
        choices = {name: name for name in each.metadata["choices"]}
        kind = _Choice("Choice", choices) if choices else hint  # type: ignore[call-arg]  # the functional form
        return Annotated[kind, each.metadata["option"]]
    inner = get_args(hint)
    if get_origin(hint) is not Annotated or not isinstance(inner[1], str):
        return hint
    return Annotated[inner[0], typer.Option(help=inner[1], show_default=each.default is not None)]


PLAIN_WIDTH = 120


def wide_console() -> Console:
    """A console as wide as the terminal; files and pipes get `PLAIN_WIDTH` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


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


def nearest(wanted: str, known: tuple[str, ...], what: str) -> str:
    """A remedy: the nearest known word, if one is near, and all of them."""
    near = get_close_matches(wanted, known, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}{what}: {', '.join(known)}"
