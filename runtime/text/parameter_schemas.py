"""Schemas of single parameters, for tool calls with separate arguments: strings as plain text, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compress.common.errors import RequestError
from runtime.text.tool_format import Tool

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
"""Keywords of a tool's schema that can be enforced one parameter at a time."""
TEXT_KEYS = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples"}
"""Keywords of a text parameter that can be enforced."""


def properties_of(tool: Tool) -> dict[str, Schema]:
    """Returns the schemas of a tool's parameters, each with the definitions it may refer to."""
    root = tool.get("parameters") or {}
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    found = root.get("properties")
    properties = found if isinstance(found, Mapping) else {}
    return {name: {**shared, **resolve(each, root)} for name, each in properties.items() if isinstance(each, Mapping)}


def resolve(schema: Schema, root: Schema) -> Schema:
    """Follows a local reference."""
    for _ in range(8):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **found}
    return schema


def types_of(schema: Schema) -> set[str]:
    """Returns the JSON types of a schema; empty if it has no type."""
    named = schema.get("type")
    if named is not None:
        return {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    found = {type_of(value) for value in values}
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, ()):
            found |= types_of(option) if isinstance(option, Mapping) else set()
    return found


def type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def is_text(schema: Schema | None) -> bool:
    """Returns whether a parameter accepts strings only."""
    return schema is not None and types_of(schema) == {"string"}


PYTHON_VALUES = {"True": True, "False": False, "None": None}


def argument_json(text: str, schema: Schema | None) -> str:
    """Returns the JSON of an argument written as JSON, or as unquoted text if the schema allows strings."""
    types = types_of(schema or {})
    text = text.strip()
    try:
        value = PYTHON_VALUES[text] if text in PYTHON_VALUES else json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = not types or type_of(value) in types or (type_of(value) == "integer" and "number" in types)
    if not fits and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if text in PYTHON_VALUES else text


def refuse_constant(name: str) -> None:
    """Raises ValueError: JSON has no NaN or infinity."""
    raise ValueError(name)


def check_enforceable(tool: Tool) -> None:
    """Raises RequestError for a schema that cannot be enforced one parameter at a time."""
    root = tool.get("parameters") or {}
    names = [key for key in root if key not in OBJECT_KEYS and key not in DEFINITIONS]
    for schema in properties_of(tool).values():
        if is_text(schema):
            names += [key for key in schema if key not in TEXT_KEYS and key not in DEFINITIONS]
    if missing := [name for name in root.get("required", ()) if name not in properties_of(tool)]:
        names.append(f"required: {missing[0]!r} without a schema")
    if names:
        raise not_enforceable(tool, names[0])


def not_enforceable(tool: Tool, part: str) -> RequestError:
    """Returns the error for a part of a schema that cannot be enforced."""
    problem = (
        f"the schema of the tool {tool['name']!r} has {part}, which cannot be enforced in this model's format of calls"
    )
    return RequestError(problem, "Leave it out, or neither force the tool nor make it strict")
