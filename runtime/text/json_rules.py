"""Rules of JSON that follows a schema, in llguidance's Lark dialect.

Keywords that only exclude values and that a grammar cannot express are left out of a schema: what is left allows every
value that the schema allows, and more. Other keywords that a grammar cannot express change the meaning of a schema;
they stay, and compiling refuses them by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

EXCLUDING = frozenset({"contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not"})
EXCLUDING |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
"""Keywords that only exclude values, and that no grammar of llguidance expresses."""
COMPANIONS = frozenset({"else", "maxContains", "minContains", "then"})
"""Keywords without an effect of their own; the one that each belongs to is named."""
NO_EFFECT = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}

FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""Formats of strings that llguidance expresses."""
IRREGULAR = re.compile(r"(?<!\\)(\\\\)*(\\[1-9bB]|\(\?<?[=!])")
"""Parts of a pattern that no regular grammar expresses: back-references, word boundaries and look-around."""

NESTED = frozenset({"additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"})
NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Keywords with a schema or a list of them, and with schemas by name."""


STRICT = {"lenient": False, "coerce_one_of": True}
"""Unknown keywords are errors; the choices of `oneOf` may overlap."""
COMPACT = {**STRICT, "whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""A space may follow a comma or a colon: models were trained with it and without it."""
INDENTED = {**STRICT, "whitespace_pattern": r"( |\n[ \t]{0,20})?"}
"""Whitespace is a space, or a newline with indentation, so that a model cannot continue it forever."""
OPTIONS_PLACE = '"x-guidance": {}'
"""Position of the options, which depend on the request. No string in a schema or in Lark contains this text."""


def value_rule(schema: Mapping[str, Any]) -> str:
    """Returns the right side of a rule for JSON that follows a schema, as far as a grammar can express it."""
    # Overrides options in the schema, which could disable strictness.
    return f"%json {json.dumps({**relax(schema)[0], 'x-guidance': {}})}"


def with_whitespace(rules: str, *, compact: bool) -> str:
    """Returns rules whose JSON is compact, or may have line breaks and indentation."""
    return rules.replace(OPTIONS_PLACE, f'"x-guidance": {json.dumps(COMPACT if compact else INDENTED)}')


def unenforced(schema: Mapping[str, Any] | str) -> list[str]:
    """Returns the keywords of a schema, or of its text, that are not enforced; none of a text that is not a schema."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return []
    return relax(read)[1] if isinstance(read, Mapping) else []


def relax(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a schema without keywords that cannot be enforced, and the names of these keywords, in order."""
    dropped: set[str] = set()
    return _relaxed(schema, dropped), sorted(dropped)


def _relaxed(schema: Any, dropped: set[str]) -> Any:
    if isinstance(schema, list):
        return [_relaxed(each, dropped) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "oneOf" in schema and not are_exclusive(schema["oneOf"]):
        dropped.add("oneOf")  # it stays, and is followed as anyOf
    found = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _relaxed(each, dropped) for name, each in value.items()}
        elif key in NESTED:
            found[key] = _relaxed(value, dropped)
        elif not is_inexpressible(key, schema):
            found[key] = value
        elif key not in COMPANIONS and NO_EFFECT.get(key) is not value:
            dropped.add(key)
    return found


def is_inexpressible(key: str, schema: Mapping[str, Any]) -> bool:
    """Returns whether a keyword of a schema only excludes values and cannot be expressed."""
    value = schema[key]
    if key == "pattern":
        return isinstance(value, str) and IRREGULAR.search(value) is not None
    if key == "format":  # of numbers it says how they are stored
        is_known = not isinstance(value, str) or value in FORMATS
        return not is_known and "string" in (_types(schema) or {"string"})
    return key in EXCLUDING or key in COMPANIONS


def are_exclusive(choices: Any) -> bool:
    """Returns whether no value fits two of some schemas, by their types or listed values alone."""
    if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
        return False
    for groups in ([_types(each) for each in choices], [_values(each) for each in choices]):
        if all(groups) and sum(map(len, groups)) == len(set().union(*groups)):
            return True
    return len(choices) < 2


def _types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    texts = [each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)]
    return {"number" if each == "integer" else each for each in texts}


def _values(schema: Mapping[str, Any]) -> set[str]:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(each, sort_keys=True) for each in listed} if isinstance(listed, list) else set()
