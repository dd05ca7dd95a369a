"""What a request may say. Anything else is refused by name: a field accepted and ignored would be a lie."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from runtime.types import MAX_ANSWERS, MAX_SEED

MAX_STOP_STRINGS = 16
T = TypeVar("T")


def is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def check_prompt(value: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(value, str) or is_token_list(value):
        return value
    several = value if isinstance(value, list) else []
    if several and (all(isinstance(item, str) for item in several) or all(map(is_token_list, several))):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def check_stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) > MAX_STOP_STRINGS or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    return value


def check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for i, part in enumerate(value):
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise ValueError(f'part {i} is not {{"type": "text", "text": "..."}}; other kinds are not supported')
        if not isinstance(part["text"], str):
            raise ValueError(f"the text of part {i} must be a string")
    return value


def only(value: T) -> AfterValidator:
    """Accepts one value: what the server does anyway. Clients that always send the field keep working."""

    def check(given: T | None) -> T | None:
        if given is not None and given != value:
            raise ValueError(f"only {value} is supported, not {given}")
        return given

    return AfterValidator(check)


class Strict(BaseModel):
    """No unknown fields, no conversions between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[TextPart], BeforeValidator(check_content)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationRequest(Strict):
    """The fields that completions and chat share. A field given as null has its default."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0 is off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: Annotated[str | list[str] | None, BeforeValidator(check_stop)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    presence_penalty: Annotated[float | None, only(0)] = None
    frequency_penalty: Annotated[float | None, only(0)] = None
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
        """Alternatives per token to report; None reports no log-probabilities."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(check_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @model_validator(mode="after")
    def check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported: prompt tokens are not scored")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
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

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
