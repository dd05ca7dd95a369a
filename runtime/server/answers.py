"""JSON schemas of answers, for the server's description."""

from __future__ import annotations

from typing import Any

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
