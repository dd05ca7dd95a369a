"""Chat templates: the one renderer of the toolkit, in a sandbox, with a budget of steps and a limit of size.

A template comes with a checkpoint, and it may loop for ever or multiply its text. So loop iterations, calls and sizes
of values are metered while it runs, and operations that may make a large value are checked first. The budget grows
with the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from compress.common.errors import CheckpointError, RequestError, ToolkitError

MIN_STEPS, STEPS_PER_VALUE = 100_000, 100
"""Budget in loop iterations and calls, and more for each value of the conversation."""

STEP_CHARACTERS, STEP_ITEMS = 4096, 64
"""Size of text and lists that costs a step when it is made or read."""

MIN_SIZE, SIZE_PER_CHARACTER, SIZE_PER_VALUE = 2**24, 16, 1024
"""Limit of one text or list, and of all that is written, and more for the conversation."""

MAX_WIDTH = 2**16
"""Limit of the width of formatted text, and of the bits of a number."""

T = TypeVar("T")


@dataclass(slots=True)
class _Meter:
    """Steps and size of one rendering. Raises RequestError: a limit is exceeded."""

    max_steps: int
    max_size: int
    num_steps: int = 0
    num_written: int = 0

    def spend(self, num_steps: int) -> None:
        self.num_steps += num_steps
        if self.num_steps > self.max_steps:
            raise RequestError(f"the model's chat template takes more than {self.max_steps} steps", REMEDY)

    def check(self, size: int) -> None:
        if size > self.max_size:
            raise RequestError(f"the model's chat template makes more than {self.max_size} characters", REMEDY)

    def check_width(self, *widths: object) -> None:
        for width in widths:
            if isinstance(width, int) and width > MAX_WIDTH:
                raise RequestError(f"the model's chat template makes text {width} wide, above {MAX_WIDTH}", REMEDY)

    def check_format(self, text: str, values: Iterable[object]) -> None:
        """Checks the widths in a format string, and those among the values if it takes widths from there."""
        self.check_width(*map(int, re.findall(r"\d{5,18}", text)))
        if re.search(r"\d{19}", text):
            self.check(self.max_size + 1)
        if "*" in text or re.search(r"\{[^}]*\{", text):
            self.check_width(*values)
        self.check(len(text) + self.weigh([*values]))

    def passed(self, value: T) -> T:
        """Counts a value that was made or read as a whole, and returns it."""
        if isinstance(value, str | bytes):
            self.check(len(value))
            self.spend(len(value) // STEP_CHARACTERS)
        elif isinstance(value, list | tuple | dict | range):
            self.check(len(value))
            self.spend(len(value) // STEP_ITEMS)
        elif isinstance(value, int) and value.bit_length() > MAX_WIDTH:
            self.check_width(value)
        return value

    def weigh(self, value: object) -> int:
        """Counts a value with all that is nested in it, and returns its size."""
        size = weigh(value, self.max_size)
        self.check(size)
        self.spend(size // STEP_CHARACTERS)
        return size

    def text(self, value: object) -> str:
        """Returns a value as text."""
        if not isinstance(value, str):
            self.weigh(value)
            value = str(value)
        return self.passed(value)

    def write(self, value: object) -> str:
        """Returns a value as text that is written."""
        text = self.text(value)
        self.num_written += len(text)
        self.check(self.num_written)
        return text


REMEDY = "Shorten the conversation, or correct the template"


def weigh(value: object, limit: int) -> int:
    """Returns the size of a value with all that is nested in it; stops above `limit`. A value is worth as many
    characters as cost the same."""
    total, left = 0, [value]
    while left and total <= limit:
        value = left.pop()
        total += STEP_CHARACTERS // STEP_ITEMS + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
    return total


class _Metering(NodeTransformer):
    """Inserts a step into the body and the condition of each loop, and meters static text, joined text, slices and what
    is compared."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (named so by the base class)
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("step", [], node.lineno), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("join", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("passed", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _call("passed", [node.expr], node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=lineno), arguments, [], None, None, lineno=lineno)


METER = " meter"
"""Variable of the meter; no template can name it."""


def _meter_of(context: Context) -> _Meter:
    return cast(_Meter, context.parent[METER])


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter per rendering."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    @staticmethod
    def step() -> bool:
        return True

    @staticmethod
    def passed(value: Any) -> Any:
        return value  # counted as the result of a call

    @staticmethod
    @pass_context
    def join(context: Context, *values: object) -> str:
        meter = _meter_of(context)
        texts = [meter.text(value) for value in values]
        meter.check(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.spend(1)
        if called is self.step or called is self.passed:
            return meter.passed(args[0]) if args else True
        args = _check_method(meter, called, args, kwargs)
        return meter.passed(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        if operator == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(count, int):
                    meter.check(len(many) * count)
        elif operator == "%" and isinstance(left, str):
            meter.check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.check_width(left.bit_length() * right)
        return meter.passed(super().call_binop(context, operator, left, right))


def _check_method(meter: _Meter, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Checks a call whose result may be far larger than its arguments; returns the arguments."""
    text = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # the sandbox wraps str.format
    name = getattr(called, "__name__", "")
    if not isinstance(text, str):
        if name == "generate_lorem_ipsum":
            meter.check_width(*(value * 100 for value in (*args, *kwargs.values()) if isinstance(value, int)))
        return args
    if name == "join" and args:
        args = ([*args[0]], *args[1:])
    meter.passed(text)
    _check_text(meter, name, text, (*args, *kwargs.values()))
    return args


def _check_text(meter: _Meter, name: str, text: str, arguments: Sequence[Any]) -> None:
    """Checks a method or filter that makes text."""
    if name in ("format", "format_map"):
        meter.check_format(text, arguments)
    elif name == "join" and arguments:
        meter.check(meter.weigh(arguments[0]) + len(arguments[0]) * len(text))
    elif name == "replace" and len(arguments) > 1:
        old, new = str(arguments[0]), str(arguments[1])
        meter.check(len(text) + (len(text) // max(len(old), 1) + 1) * len(new))
    elif name == "indent":
        width = arguments[0] if arguments else 4
        meter.check(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
    elif name == "translate" and arguments:
        meter.check(len(text) * meter.weigh(arguments[0]))
    elif name in WIDE:
        meter.check_width(*arguments)


WIDE = frozenset({"batch", "center", "expandtabs", "ljust", "rjust", "slice", "tojson", "zfill"})
"""Methods and filters with a width or a count among their arguments."""

SLOW, SLOW_FACTOR = frozenset({"striptags", "title", "truncate", "urlize", "wordcount", "wordwrap"}), 256
"""Filters that take long, and how many characters one of theirs is worth."""

IMMEDIATE = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""Filters that do not go through their values."""

STRUCTURAL = IMMEDIATE | {
    "dictsort",
    "groupby",
    "items",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
}
STRUCTURAL |= {"random", "select", "selectattr", "sort", "sum", "unique"}
"""Filters that make no text, so nested values need not be weighed."""


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter with a meter."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.spend(1)
        if name not in IMMEDIATE:
            meter.passed(value)
        if name not in STRUCTURAL:
            _check_filter(meter, name, value, (*args, *kwargs.values()))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return meter.passed(function(*([first[passed]] if passed else []), value, *args, **kwargs))

    return metered


def _check_filter(meter: _Meter, name: str, value: Any, arguments: Sequence[Any]) -> None:
    if name == "join":
        items = value if isinstance(value, str | list | tuple) else ()
        _check_text(meter, name, str(arguments[0]) if arguments else "", [items])
        return
    text = value if isinstance(value, str) else ""
    if text != value:
        meter.weigh(value)
    if name in SLOW:
        meter.check(len(text) * SLOW_FACTOR)
    _check_text(meter, name, text, arguments)


@pass_context
def _finalize(context: Context, value: object) -> str:
    return _meter_of(context).write(value)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training; only its body is used here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which is not how models were trained.
    return json.dumps(value, **({"ensure_ascii": False} | options))


OPTIONAL = {"tools", "add_generation_prompt"}
"""Variables that a template may leave out."""


class ChatTemplate:
    """A compiled chat template. Raises CheckpointError: the template is not valid jinja.

    Args:
        special_tokens: variables such as `bos_token` that the template may use.

    Attributes:
        variables: names of the variables that the template uses.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
        )
        filters = environment.filters | {"tojson": _to_json}
        environment.filters = {name: _metered(name, function) for name, function in filters.items()}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            parsed = environment.parse(source)
            self.variables = find_undeclared_variables(parsed)
            code = environment.compile(_Metering().visit(parsed))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the model's chat template fails at line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise CheckpointError("the model's chat template is nested too deeply") from error
        except Exception as error:  # limits of Python's compiler, such as 20 nested loops
            raise CheckpointError(f"the model's chat template cannot be compiled: {reason_of(error)}") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the text of a conversation up to the assistant's answer. Raises RequestError: the template refuses
        these messages, has no such variable, or exceeds its budget.

        Args:
            messages: `{"role": ..., "content": ...}`, in order.
            variables: further variables of the template, for example `tools`; `add_generation_prompt` is on.
        """
        if unknown := sorted(variables.keys() - self.variables - OPTIONAL):
            raise RequestError(f"the model's chat template has no variable {unknown[0]!r}", "leave it out")
        given = {"add_generation_prompt": True} | self._special_tokens | variables
        given["messages"] = [dict(message) for message in messages]
        try:
            return self._template.render({**given, METER: _new_meter(given)})
        except ToolkitError:
            raise
        except Exception as error:  # filters raise errors of any type for values of another type
            raise RequestError(
                f"the model's chat template refuses these messages: {reason_of(error)}",
                "change roles, order or content",
            ) from error


MAX_REASON = 500


def reason_of(error: BaseException) -> str:
    """Returns the message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__


def _new_meter(given: object) -> _Meter:
    """Returns a meter for the values of a conversation."""
    num_values, num_characters, left = 0, 0, [given]
    while left:
        value = left.pop()
        num_values += 1
        if isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    max_size = MIN_SIZE + SIZE_PER_CHARACTER * num_characters + SIZE_PER_VALUE * num_values
    return _Meter(MIN_STEPS + STEPS_PER_VALUE * num_values, max_size)
