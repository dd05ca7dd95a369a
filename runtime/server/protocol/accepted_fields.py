"""Fields that clients send and that change no answer here, and why others are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.server.protocol.strict import OnlyFalse, OnlyTrue, Strict, at_most

Text = Annotated[str, Field(max_length=512)]
Modalities = Annotated[list[Literal["text"]], at_most(1), Field(max_length=1)]

REFUSED = {
    "best_of": "ask for n answers with logprobs and choose among them",
    "suffix": "write both parts into the prompt, in the form that the model was trained on",
    "dimensions": "vectors have the width of the model; cut them in the client",
    "n_predict": "send max_tokens",
    "n_probs": "send logprobs",
    "repeat_penalty": "send repetition_penalty",
    "grammar": "send guided_grammar, in llguidance's form of Lark",
    "json_schema": "send guided_json",
    "chat_template": "serve the model with this template in its folder",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "this server reads and writes text only",
    "prediction": "the server drafts tokens by itself, with --speculative-model",
    "previous_response_id": "send the whole conversation: nothing is stored",
    "conversation": "send the whole conversation: nothing is stored",
    "thread": "send the whole conversation: nothing is stored",
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
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description="changes nothing")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="changes nothing")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="changes nothing")
    modalities: Modalities | None = Field(None, description="text is the only one")


class DefaultFields(Strict):
    """Fields of vLLM and llama.cpp whose values change nothing, or have one value that changes nothing."""

    use_beam_search: OnlyFalse | None = Field(None, description="there is no beam search")
    length_penalty: float | None = Field(None, description="changes nothing without beam search")
    spaces_between_special_tokens: OnlyTrue | None = Field(None, description="changes nothing")
    return_token_ids: OnlyFalse | None = Field(None, description="text is returned")
    return_tokens_as_token_ids: OnlyFalse | None = Field(None, description="text is returned")
    guided_decoding_backend: Text | None = Field(None, description="changes nothing: there is one")
    cache_prompt: bool | None = Field(None, description="changes nothing: prefixes are always cached")
