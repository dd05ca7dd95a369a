"""Chat templates: jinja2 in a sandbox, with the functions that templates of Hugging Face models expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compress.checkpoint.errors import CheckpointError, RequestError


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which models have not seen in training.
    return json.dumps(value, **({"ensure_ascii": False} | options))


class ChatTemplate:
    """One compiled template.

    Args:
        source: the jinja template.
        special_tokens: variables such as `bos_token` that the template may use.

    Raises:
        CheckpointError: the template is not valid jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self._variables = find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the model's chat template fails at line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Text of the conversation, up to where the assistant's answer begins.

        Args:
            messages: `{"role": ..., "content": ...}`, in order.
            variables: further variables of the template, for example `tools`; `add_generation_prompt` is on.

        Raises:
            RequestError: the template refuses these messages, or has no such variable.
        """
        if unknown := sorted(variables.keys() - self._variables - {"tools"}):  # which a template may leave out
            raise RequestError(f"the model's chat template has no variable {unknown[0]!r}", "leave it out")
        given = {"add_generation_prompt": True} | self._special_tokens | variables
        try:
            return self._template.render(messages=[dict(message) for message in messages], **given)
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "change roles, order or content"
            ) from error
