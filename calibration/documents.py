"""One document: a text, or a chat that a model's template turns into one."""

from __future__ import annotations

from collections.abc import Mapping

from compress.checkpoint.errors import DataError

Messages = list[dict[str, str]]
Document = str | Messages

FIELDS = ("text", "messages")
"""Fields of a record that hold a document, the first that is there wins."""


def document_of(record: object, place: str) -> Document:
    """The document in a record of a .jsonl file, a table or a dataset.

    Args:
        record: a mapping with a `text` string or a `messages` list of `{role, content}`.
        place: file and line, or dataset and row, for the error.

    Raises:
        DataError: neither is there; names the fields that are.
    """
    if isinstance(record, Mapping):
        if isinstance(record.get("text"), str):
            return record["text"]
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return messages
    raise no_document(place, list(record) if isinstance(record, Mapping) else None)


def no_document(place: str, fields: list[str] | None) -> DataError:
    """The refusal of a record or table without a document; None when it has no fields at all."""
    found = "it is not an object" if fields is None else f"its fields: {', '.join(map(str, fields)) or 'none'}"
    return DataError(
        f"{place} has neither a `text` string nor a `messages` list ({found})",
        'Rename the field to "text", or to "messages" with {"role", "content"} objects for chats',
    )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()
