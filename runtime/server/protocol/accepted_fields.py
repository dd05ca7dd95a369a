"""Fields of OpenAI's API that clients send and that change no answer here, and why others are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runtime.server.protocol.strict import Strict, at_most

Text = Annotated[str, Field(max_length=512)]
Modalities = Annotated[list[Literal["text"]], at_most(1), Field(max_length=1)]

REFUSED = {
    "best_of": "ask for n answers with logprobs and choose among them",
    "suffix": "write both parts into the prompt, in the form that the model was trained on",
    "dimensions": "vectors have the width of the model; cut them in the client",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "this server reads and writes text only",
    "prediction": "the server drafts tokens by itself, with --speculative-model",
    "previous_response_id": "send the whole conversation: nothing is stored",
    "conversation": "send the whole conversation: nothing is stored",
    "max_tool_calls": "count calls in the client, which answers them",
    "web_search_options": "the server reaches no network; give the model a tool that does",
}
"""Replacements of fields that would change an answer, by name."""


class AcceptedFields(Strict):
    """Fields that are checked and then left alone: nothing is stored, and all requests have one tier of service."""

    metadata: Annotated[dict[Text, Text] | None, Field(max_length=16)] = Field(None, description="changes nothing")
    store: bool | None = Field(None, description="changes nothing: no request is stored")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="changes nothing: priority orders requests"
    )
    safety_identifier: Text | None = Field(None, description="changes nothing")
    prompt_cache_key: Text | None = Field(None, description="changes nothing: equal prefixes are found without a key")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="changes nothing")
    modalities: Modalities | None = Field(None, description="text is the only one")
