"""Lines that begin with a slash: they change the conversation instead of going to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint.errors import RequestError
from runtime.chat.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        usage: how it is typed. help: what it does.
        run: does it and says so; takes what stands behind the name.
    """

    usage: str
    help: str
    run: Callable[[Conversation, str], str]


def run_command(conversation: Conversation, line: str) -> str:
    """Obeys a line that begins with a slash and says what was done.

    Raises:
        RequestError: no such command, or a value that cannot be.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"there is no command {name}", f"There are {', '.join(COMMANDS)}")
    return COMMANDS[name].run(conversation, argument.strip())


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text
    return "system message set" if text else "no system message"


def _temperature(conversation: Conversation, text: str) -> str:
    if text:
        try:
            value = float(text)
        except ValueError as error:
            raise RequestError(f"{text!r} is no temperature", "Write a number, for example /temperature 0.7") from error
        conversation.sampling = replace(conversation.sampling, temperature=value)
    return f"temperature {conversation.sampling.temperature:g}"


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "the conversation begins anew" + ("; the system message stays" if conversation.system else "")


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise RequestError("/save has no file", "Name one, for example /save chat.json")
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
    "/system": Command("/system TEXT", "Set the system message; without text: remove it.", _system),
    "/temperature": Command("/temperature X", "Set or show the temperature; 0 is greedy.", _temperature),
    "/reset": Command("/reset", "Forget what was said.", _reset),
    "/save": Command("/save FILE", "Write the conversation as JSON.", _save),
    "/help": Command("/help", "Show this list.", _help),
    "/quit": Command("/quit", "Leave; Ctrl-D does too.", _quit),
}
