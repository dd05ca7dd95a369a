"""Options that belong together, as one dataclass: both command lines give several commands the same ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command as Typer takes it: each parameter whose type is a dataclass becomes one option per field, in its place.

    Args:
        command: its groups need no default; their fields are annotated as options of Typer, and bring their defaults.

    Raises:
        ValueError: two options have the same name.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    spread = [option for each in parameters for option in _options(each)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
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
        default = _default(each)
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name])


def _default(option: Field[Any]) -> Any:
    return inspect.Parameter.empty if option.default is MISSING else option.default
