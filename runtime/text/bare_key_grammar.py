"""Grammar of objects with bare keys and strings between marks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from runtime.text.json_rules import value_rule
from runtime.text.parameter_schemas import (
    DEFINITIONS,
    OBJECT_KEYS,
    TEXT_KEYS,
    Schema,
    is_text,
    not_enforceable,
    resolve,
    types_of,
)
from runtime.text.tagged_calls import characters
from runtime.text.tool_format import Tool
from runtime.text.tool_grammar import escape, literal

ARRAY_KEYS = {"type", "items", "title", "description", "default", "examples"}
MARKS = {"title", "description", "default", "examples"}
PLAIN_TYPES = {"integer", "number", "boolean", "null"}
"""Types with values in JSON syntax."""
MOST_LEVELS = 16


class BareKeyGrammar:
    """Lark rules of the calls of one tool. Keys are sorted case-insensitively, as in chat templates.

    Args:
        quote: mark around strings.
        special_ids: ids of special tokens.
    """

    def __init__(self, tool: Tool, quote: str, special_ids: Mapping[str, int]) -> None:
        self._tool, self._quote, self._special_ids = tool, quote, special_ids
        self._root: Schema = tool.get("parameters") or {}

    def call_rules(self, rule: str, before: str) -> list[str]:
        """Returns the rules of the head `before` and the arguments.

        Raises:
            RequestError: the tool's schema cannot be enforced.
        """
        return [
            f"{rule}: {literal(before, self._special_ids)} {rule}_object",
            *self._object(f"{rule}_object", {"properties": {}, **self._root}, 0),
        ]

    def _value(self, rule: str, schema: Schema, level: int) -> Iterator[str]:
        schema = resolve(schema, self._root)
        if level > MOST_LEVELS:
            raise not_enforceable(self._tool, "recursive definitions")
        if options := self._options(schema):
            yield f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(options)))}"
            for number, option in enumerate(options):
                yield from self._value(f"{rule}_{number}", option, level + 1)
        elif is_text(schema):
            yield from self._text(rule, schema)
        elif types_of(schema) == {"array"} and isinstance(schema.get("items"), Mapping):
            self._check(schema, ARRAY_KEYS)
            yield f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"'
            yield from self._value(f"{rule}_item", schema["items"], level + 1)
        elif types_of(schema) == {"object"} and isinstance(schema.get("properties"), Mapping):
            yield from self._object(rule, schema, level + 1)
        elif types_of(schema) and types_of(schema) <= PLAIN_TYPES:
            shared = {key: self._root[key] for key in DEFINITIONS if key in self._root}
            yield f"{rule}: {value_rule({**shared, **schema})}"
        else:
            named = ", ".join(sorted(types_of(schema)))
            raise not_enforceable(self._tool, f"a parameter of type {named}" if named else "a parameter of any type")

    def _options(self, schema: Schema) -> Sequence[Schema]:
        """Returns alternative schemas; none if there is no choice."""
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._check(schema, {key} | MARKS)
                return cast(Sequence[Schema], schema[key])
        types = schema.get("type")
        return [{**schema, "type": each} for each in types] if isinstance(types, list) else []

    def _object(self, rule: str, schema: Schema, level: int) -> Iterator[str]:
        """Yields rules of keys in order; an optional key may be omitted with its comma."""
        self._check(schema, OBJECT_KEYS)
        names, required = sorted(schema["properties"], key=str.lower), schema.get("required", ())
        if missing := [name for name in required if name not in names]:
            raise not_enforceable(self._tool, f"required: {missing[0]!r} without a schema")
        yield f'{rule}: "{{" {rule}_first_0 "}}"'
        for number, name in enumerate(names):
            pair = f"{literal(f'{name}:', self._special_ids)} {rule}_value_{number} {rule}_more_{number + 1}"
            for place, comma in (("first", ""), ("more", '"," ')):
                skipped = "" if name in required else f" | {rule}_{place}_{number + 1}"
                yield f"{rule}_{place}_{number}: {comma}{pair}{skipped}"
            yield from self._value(f"{rule}_value_{number}", schema["properties"][name], level + 1)
        yield from (f'{rule}_{place}_{len(names)}: ""' for place in ("first", "more"))

    def _text(self, rule: str, schema: Schema) -> Iterator[str]:
        self._check(schema, TEXT_KEYS)
        mark = literal(self._quote, self._special_ids)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            yield f"{rule}: {mark} ({' | '.join(json.dumps(each, ensure_ascii=False) for each in values)}) {mark}"
        elif self._quote in self._special_ids:  # which text cannot contain
            yield f"{rule}: {mark} {rule.upper()}_TEXT {mark}"
            yield f"{rule.upper()}_TEXT: /{characters(schema)}/"
        else:
            yield f"{rule}: {mark} {rule}_text"
            yield f"{rule}_text[lazy]: /{characters(schema)}{escape(self._quote)}/"

    def _check(self, schema: Schema, known: set[str]) -> None:
        if unknown := [key for key in schema if key not in known and key not in DEFINITIONS]:
            raise not_enforceable(self._tool, unknown[0])
