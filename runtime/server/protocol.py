"""Request bodies. Unknown and unsupported fields are refused by name, never ignored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from runtime.core.request import MAX_ANSWERS, MAX_PRIORITY, MAX_SEED, MAX_TOP_K, Grammar
from runtime.server.protocol_tools import (
    AssistantCall,
    ResponseFormat,
    Strict,
    StructuredFields,
    ToolFields,
    contradiction,
)

MAX_BIAS = 100
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")

TOKEN_IDS = range(2**31)
"""Possible token ids; the engine checks them against the vocabulary."""
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_IDS.stop)]
Bias = Annotated[
    dict[Annotated[str, Field(pattern=f"^({TOKEN_ID.pattern})$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(json_schema_extra={"additionalProperties": False}),
]


def check_bias(value: Any) -> Any:
    """Validates a map from token ids, which are strings in JSON, to numbers."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) and TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError('must be an object from token ids to numbers, for example {"42": -100}')
    for token_id, bias in value.items():
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {token_id} must be a number between -{MAX_BIAS} and {MAX_BIAS}")
    return value


class SteeringFields(Strict):
    """Sampling fields of completions and chat. A field that is null has its default."""

    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=2,
        description="divides positive and multiplies negative logits of tokens that have occurred; 1 is off",
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[Bias | None, BeforeValidator(check_bias)] = Field(
        None, description="added to logits, by token id"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128, description="tokens that end the answer")
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower values are served earlier; 0 is the default"
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="cached prefixes are shared only with requests of the same salt"
    )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Pairs of a token id and the value added to its logit."""
        return tuple((int(token_id), float(bias)) for token_id, bias in (self.logit_bias or {}).items())


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message. Tool calls are in messages of the assistant, their results in messages of role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(None, description="name of the author or function; templates may omit it")
    tool_calls: Annotated[list[AssistantCall], Field(min_length=1)] | None = Field(None, validate_default=True)
    tool_call_id: str | None = Field(None, validate_default=True)
    content: str | list[TextPart] | None = Field(None, validate_default=True)
    refusal: None = Field(None, description="as in answers, so that they can be sent back unchanged")

    @field_validator("tool_calls")
    @classmethod
    def check_tool_calls(cls, value: list[AssistantCall] | None, info: ValidationInfo) -> list[AssistantCall] | None:
        if value is not None and info.data.get("role") != "assistant":
            raise contradiction("only messages of the assistant have calls")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def check_tool_call_id(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is not None) != (info.data.get("role") == "tool"):
            raise contradiction("messages of role tool need it, and only they have it")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def check_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            if info.data.get("tool_calls"):
                return None
            raise contradiction("required, unless the message has tool_calls")
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        for i, part in enumerate(value):
            given = {key for key, held in part.items() if held is not None} if isinstance(part, dict) else set()
            if given != {"type", "text"} or part["type"] != "text":
                raise ValueError(f'part {i} is not {{"type": "text", "text": "..."}}; other kinds are not supported')
            if not isinstance(part["text"], str):
                raise ValueError(f"the text of part {i} must be a string")
        return value

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def as_json(self) -> dict[str, Any]:
        """Returns the message for templates: content is text, arguments are objects, `developer` becomes `system`."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        calls = {"tool_calls": [call.as_json() for call in self.tool_calls]} if self.tool_calls else {}
        answer_to = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": role, **name, "content": self.text, **calls, **answer_to}


MAX_STOP_STRINGS = 16
TAKEN_VARIABLES = {"self", "messages", "tools", "add_generation_prompt"}

# Bounds of the published description. The validators below enforce them, with clearer messages.
TokenList = Annotated[list[TokenId], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None
Prompt = str | Annotated[list[str], Field(min_length=1)] | TokenList | Annotated[list[TokenList], Field(min_length=1)]


def is_token_list(value: Any) -> bool:
    """Returns whether a value is one prompt of token ids."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and item in TOKEN_IDS for item in value)


def check_prompt(value: Any) -> Any:
    """Validates a text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(value, str) or is_token_list(value):
        return value
    several = value if isinstance(value, list) else []
    if several and (all(isinstance(item, str) for item in several) or all(map(is_token_list, several))):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def separate_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Returns the prompts of a field that holds one or several."""
    return [prompt] if isinstance(prompt, str) or is_token_list(prompt) else prompt


def check_stop(value: Any) -> Any:
    """Validates stop strings: none, one or a few, not empty. Raises ValueError."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) > MAX_STOP_STRINGS or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    return value


def check_template_variables(value: Any) -> Any:
    """Validates variables of a chat template: none that the request has other fields for."""
    if isinstance(value, dict) and (taken := sorted(value.keys() & TAKEN_VARIABLES)):
        raise contradiction(f"{taken[0]} cannot be set here")
    return value


class StreamOptions(Strict):
    include_usage: bool | None = None


class GenerationRequest(StructuredFields, SteeringFields):
    """Fields of completions and chat. A field that is null has its default."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K, description="0 is off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=MAX_SEED + 1)  # a power of two: descriptions hold bounds as floats
    stop: Annotated[Stop, BeforeValidator(check_stop)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    user: str | None = Field(None, description="written to the server's log beside the request's id")

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only together with stream=true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None reports no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for the prompt's tokens."""
        return None


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[Prompt, BeforeValidator(check_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0, description="0 only computes the prompt, to score it with echo")
    echo: bool | None = Field(None, description="return the prompt before the answer; with logprobs, score it too")

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(ToolFields, GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(check_template_variables)] = Field(
        None, description="variables of the model's chat template, such as enable_thinking"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def check_pairs(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            both = f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}"
            raise ValueError(f"{both} disagree; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only together with logprobs=true")
        return self

    @model_validator(mode="after")
    def check_form_of_calls(self) -> ChatRequest:
        if self.usable_tools and self.grammar is not None:
            raise ValueError(f"{next(iter(self.forms()))} and tools exclude each other, unless tool_choice is none")
        return self

    def forms(self) -> dict[str, Grammar]:
        grammar = self.response_format.grammar if self.response_format else None
        return super().forms() | ({} if grammar is None else {"response_format": grammar})

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
