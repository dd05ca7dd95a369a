"""OpenAI's published schema of answers (`tests/data/openai_schema.json`) as validators."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PUBLISHED = Path(__file__).parents[1] / "data" / "openai_schema.json"

# Where the published types contradict the published descriptions, and what OpenAI's own server sends: places of one
# schema that may also be null. Each is used only by the tests that need it.
NULL_BEFORE_THE_END = ("choices[].finish_reason", "usage")  # of a stream's chunks
NULL_WITHOUT_CONTEXT = ("choices[].logprobs.token_logprobs[]", "choices[].logprobs.top_logprobs[]")  # first token, echo


def with_null(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable` as JSON schema says it."""
    if isinstance(schema, list):
        return [with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: with_null(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def allow_null(components: dict[str, Any], name: str, place: str) -> None:
    """Makes one place of a schema nullable, as in `choices[].finish_reason`."""
    node = components[name]
    for step in place.replace("[]", ".[]").split("."):
        node = components[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        parent, key = (node, "items") if step == "[]" else (node["properties"], step)
        node = parent[key]
    parent[key] = {**node, "nullable": True} if "$ref" not in node else {"allOf": [node], "nullable": True}


@cache
def validator(name: str, may_be_null: tuple[str, ...] = ()) -> Draft202012Validator:
    """Validator of one published schema, with some of its places nullable."""
    components = json.loads(PUBLISHED.read_text())["components"]["schemas"]
    for place in may_be_null:
        allow_null(components, name, place)
    schemas = with_null(components)
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def validate(answer: Any, name: str, may_be_null: tuple[str, ...] = ()) -> None:
    """Raises jsonschema's ValidationError, which names the place, when the answer is not as published."""
    validator(name, may_be_null).validate(answer)
