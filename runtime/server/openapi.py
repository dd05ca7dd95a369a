"""What `/openapi.json` says: FastAPI's description of the routes, completed by what stands in front of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}


def thing(properties: Schema, optional: Schema | None = None) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(optional or {})},
        "additionalProperties": False,
    }


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


USAGE = thing(
    {
        "prompt_tokens": WHOLE,
        "completion_tokens": WHOLE,
        "total_tokens": WHOLE,
        "prompt_tokens_details": thing({"cached_tokens": WHOLE}),
    }
)
TOP = {"type": "object", "additionalProperties": NUMBER}
COMPLETION_LOGPROBS = thing(
    {
        "tokens": several(TEXT),
        "token_logprobs": several({"type": ["number", "null"]}),
        "top_logprobs": several(or_null(TOP)),
        "text_offset": several(WHOLE),
    }
)
TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": several(WHOLE)}
CHAT_LOGPROBS = thing(
    {"content": several(thing({**TOKEN, "top_logprobs": several(thing(TOKEN))})), "refusal": {"type": "null"}}
)
CALL = thing({"id": TEXT, "type": one_of("function"), "function": thing({"name": TEXT, "arguments": TEXT})})
MESSAGE = thing(
    {"role": one_of("assistant"), "content": TEXT_OR_NULL, "refusal": {"type": "null"}},
    {"tool_calls": several(CALL)},
)


def generated(kind: str, choice: Schema) -> Schema:
    """Answers of completions and chat."""
    envelope = {"id": TEXT, "object": one_of(kind), "created": WHOLE, "model": TEXT}
    return thing({**envelope, "choices": several(choice), "usage": USAGE})


MODEL = thing({"id": TEXT, "object": one_of("model"), "created": WHOLE, "owned_by": TEXT, "max_model_len": WHOLE})
HEALTH = thing({"status": one_of("ok", "unhealthy"), "reason": TEXT, "running": WHOLE, "waiting": WHOLE})
VECTOR = thing({"object": one_of("embedding"), "index": WHOLE, "embedding": {"anyOf": [several(NUMBER), TEXT]}})
REASONS = one_of("stop", "length")

ANSWERS: dict[str, Schema] = {
    "/v1/completions": generated(
        "text_completion",
        thing({"index": WHOLE, "text": TEXT, "logprobs": or_null(COMPLETION_LOGPROBS), "finish_reason": REASONS}),
    ),
    "/v1/chat/completions": generated(
        "chat.completion",
        thing(
            {
                "index": WHOLE,
                "message": MESSAGE,
                "logprobs": or_null(CHAT_LOGPROBS),
                "finish_reason": one_of("stop", "length", "tool_calls"),
            }
        ),
    ),
    "/v1/embeddings": thing(
        {
            "object": one_of("list"),
            "data": several(VECTOR),
            "model": TEXT,
            "usage": thing({"prompt_tokens": WHOLE, "total_tokens": WHOLE}),
        }
    ),
    "/v1/models": thing({"object": one_of("list"), "data": several(MODEL)}),
    "/v1/models/{name}": MODEL,
    "/health": HEALTH,
    "/tokenize": thing(
        {"tokens": several(WHOLE), "count": WHOLE, "max_model_len": WHOLE}, {"token_strs": several(TEXT)}
    ),
    "/detokenize": thing({"prompt": TEXT}),
}


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the request field it is about"},
                "code": {"type": ["string", "null"]},
            },
            "additionalProperties": False,
        }
    },
}
EVERYWHERE = {403: "Asked by a page of another site, or under a foreign name", 500: "The server failed"}
WITH_BODY = {
    400: "The body is not what it should be; `param` names the field",
    404: "Another model is served",
    408: "The body came too slowly",
    413: "The body is too long",
    429: "The queue is full",
    503: "The server is stopping, or had no time for this request",
    504: "The request took too long",
}
WITH_PARAMETERS = {404: "There is no such thing"}
WITH_KEY = {401: "Missing or incorrect API key"}


class DescribedApi(FastAPI):
    """A FastAPI application whose description is true.

    Args:
        model_name: the one model that requests may name.
        needs_key: whether requests must carry an API key.
    """

    def __init__(self, *, model_name: str, needs_key: bool, **options: Any) -> None:
        super().__init__(**options)
        self.model_name = model_name
        self.needs_key = needs_key

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = self.completed(super().openapi())
        return self.openapi_schema

    def completed(self, description: dict[str, Any]) -> dict[str, Any]:
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own 422, which this server never sends
            schemas.pop(name, None)
        for schema in schemas.values():
            name_model(schema, self.model_name)
            write_whole_bounds(schema)
        schemas["Error"] = ERROR
        if self.needs_key:
            description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in description["paths"].items():
            for operation in item.values():
                self.complete(operation, open_to_all=path == "/health")
                if path in ANSWERS:
                    operation["responses"]["200"]["content"]["application/json"] = {"schema": ANSWERS[path]}
        return description

    def complete(self, operation: dict[str, Any], open_to_all: bool) -> None:
        """Adds the errors that the operation may answer with, and that it needs a key."""
        needs_key = self.needs_key and not open_to_all
        if needs_key:
            operation["security"] = [{"key": []}]
        errors = {
            **EVERYWHERE,
            **(WITH_KEY if needs_key else {}),
            **(WITH_PARAMETERS if "parameters" in operation else {}),
            **(WITH_BODY if "requestBody" in operation else {}),
        }
        operation["responses"].pop("422", None)
        for status, words in sorted(errors.items()):
            content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
            operation["responses"].setdefault(str(status), {"description": words, "content": content})


def name_model(schema: dict[str, Any], model_name: str) -> None:
    """Says which model a request may name."""
    field = schema.get("properties", {}).get("model", {})
    for choice in (field, *field.get("anyOf", ())):
        if choice.get("type") == "string":
            choice["enum"] = [model_name]


def write_whole_bounds(schema: Any) -> None:
    """Writes bounds of integers as integers: FastAPI makes numbers with a point of them, which readers round again."""
    children = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for child in children:
        write_whole_bounds(child)
    if isinstance(schema, dict) and schema.get("type") == "integer":
        schema.update({name: int(value) for name, value in schema.items() if isinstance(value, float)})
