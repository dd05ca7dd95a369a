"""Fields that a client sent and that are not followed: named in a header of the answer, since they do no harm."""

from __future__ import annotations

from collections.abc import Mapping, Set

from runtime.server.protocol.chat import ChatRequest
from runtime.server.protocol.generation import StructuredFields
from runtime.text.json_rules import unenforced

WARNING_HEADER = "x-warning"


def schema_warnings(body: StructuredFields) -> dict[str, str]:
    """Returns keywords of JSON schemas that no grammar can express, by the field that holds the schema."""
    found = {name: {key for each in held for key in unenforced(each)} for name, held in body.schemas.items()}
    return {name: f"{', '.join(sorted(keys))} not enforced" for name, keys in found.items() if keys}


def chat_warnings(body: ChatRequest, variables: Set[str]) -> dict[str, str]:
    """Returns what is not followed of a chat request, by field.

    Args:
        variables: names of the variables of the chat template.
    """
    unread = "reasoning_effort" not in variables and body.reasoning_effort is not None
    effort = {"reasoning_effort": "the chat template has no such variable"} if unread else {}
    return effort | schema_warnings(body)


def warning_headers(warnings: Mapping[str, str]) -> dict[str, str]:
    """Returns the header that names what was not followed; none where all was."""
    return {WARNING_HEADER: "; ".join(f"{name}: {text}" for name, text in warnings.items())} if warnings else {}
