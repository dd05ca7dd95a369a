"""Bodies of completions and the fields they share with chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from runtime.core.logit_bias import MAX_BIAS, LogitBias
from runtime.core.request import (
    MAX_ANSWERS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_TOP_K,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from runtime.server.errors import ApiError
from runtime.server.protocol.accepted_fields import AcceptedFields, DefaultFields
from runtime.server.protocol.filters import FilterFields
from runtime.server.protocol.strict import OnlyFalse, Strict, at_most
from runtime.server.protocol.words import EncodedWords

CONTRADICTION = "contradiction"


def contradiction(message: str) -> PydanticCustomError:
    """Returns an error about a field that contradicts another one."""
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})


Schema = dict[str, Any] | str
MAX_CHOICES = 1000
Choices = Annotated[list[str], at_most(MAX_CHOICES), Field(min_length=1, max_length=MAX_CHOICES)]


WHITESPACE: Any = Field(None, description="false lets JSON have line breaks and indentation; it is compact by default")


class StructuredOutputs(Strict):
    """One of four constraints on an answer."""

    definition: Schema | None = Field(None, alias="json", description="a JSON schema, as an object or as text")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="in llguidance's form of Lark")
    disable_any_whitespace: bool | None = WHITESPACE

    def named(self) -> dict[str, Grammar]:
        return grammars(("json", "regex", "choice", "grammar"), self.definition, self.regex, self.choice, self.grammar)


class StructuredFields(Strict):
    """Fields that constrain the answer, of which at most one may be given."""

    guided_json: Schema | None = Field(None, description="a JSON schema, as an object or as text")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="in llguidance's form of Lark")
    structured_outputs: StructuredOutputs | None = None
    disable_any_whitespace: bool | None = WHITESPACE

    @model_validator(mode="after")
    def check_one_form(self) -> StructuredFields:
        found = list(self.forms())
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} exclude each other: an answer can have one form only; give one")
        return self

    @property
    def grammar(self) -> Grammar | None:
        found = next(iter(self.forms().values()), None)
        return found and replace(found, any_whitespace=self.any_whitespace)

    @property
    def any_whitespace(self) -> bool:
        """Whether JSON may have line breaks and indentation."""
        nested = self.structured_outputs and self.structured_outputs.disable_any_whitespace
        return False in (self.disable_any_whitespace, nested)

    @property
    def schemas(self) -> dict[str, list[Schema]]:
        """JSON schemas that the answer follows, by the name of their field."""
        nested = self.structured_outputs.definition if self.structured_outputs else None
        given = {"guided_json": self.guided_json, "structured_outputs.json": nested}
        return {name: [schema] for name, schema in given.items() if schema is not None}

    def forms(self) -> dict[str, Grammar]:
        """Grammars by the name of the field that asks for them."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        found = grammars(names, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        nested = self.structured_outputs.named() if self.structured_outputs else {}
        return found | {f"structured_outputs.{name}": grammar for name, grammar in nested.items()}


def grammars(
    names: tuple[str, ...], schema: Schema | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> dict[str, Grammar]:
    """Grammars by name, of those that are given."""
    found = (
        None if schema is None else schema_grammar(schema),
        None if regex is None else Grammar(GrammarKind.REGEX, regex),
        None if choice is None else choice_grammar(choice),
        None if lark is None else Grammar(GrammarKind.LARK, lark),
    )
    return {name: grammar for name, grammar in zip(names, found, strict=True) if grammar is not None}


def schema_grammar(schema: Schema) -> Grammar:
    """JSON that a schema allows."""
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {' | '.join(quoted)}")


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


MAX_STOP_TOKENS = MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKENS = 4096
BadWord = Annotated[str, Field(min_length=1, max_length=256)]


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
        None, description="added to logits, by token id; may name the whole vocabulary"
    )
    stop_token_ids: Annotated[list[TokenId] | None, at_most(MAX_STOP_TOKENS)] = Field(
        None, max_length=MAX_STOP_TOKENS, description="tokens that end the answer"
    )
    include_stop_str_in_output: bool | None = Field(None, description="leave the stop string in the text")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; true by default")
    min_tokens: int | None = Field(
        None, ge=0, description="tokens before which no end token or stop string ends the answer; a grammar may"
    )
    allowed_token_ids: Annotated[list[TokenId] | None, at_most(MAX_ALLOWED_TOKENS)] = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKENS, description="the only tokens of the answer"
    )
    bad_words: Annotated[list[BadWord] | None, at_most(MAX_BAD_WORDS)] = Field(
        None, max_length=MAX_BAD_WORDS, description="texts that the answer must not contain as these tokens"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, description="keep only that many tokens at the end of a longer prompt"
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="lower values are served earlier among the requests of a client; 0 is the default",
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="cached prefixes are shared only with requests of the same salt"
    )


MAX_INPUTS = 2048
"""Inputs of one request, as in OpenAI's API."""
MAX_STOP_STRINGS = 16
# Bounds of the published description. The validators below enforce them, with clearer messages.
TokenList = Annotated[list[TokenId], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None
Prompt = str | Annotated[list[str], Field(min_length=1)] | TokenList | Annotated[list[TokenList], Field(min_length=1)]


def is_token_list(value: Any) -> bool:
    """Returns whether a value is one prompt of token ids."""
    if not (isinstance(value, list) and value and type(value[0]) is int and set(map(type, value)) == {int}):
        return False
    return bool(min(value) >= 0 and max(value) < TOKEN_IDS.stop)


def check_prompt(value: Any, info: ValidationInfo) -> Any:
    """Validates the prompts of completions.

    Raises:
        ApiError: 400 for more prompts than the queue holds, or more token ids than the context.
    """
    if info.context:
        limits = info.context.limits
        if is_several(value) and len(value) > limits.max_requests:
            raise too_many_answers(len(value), limits.max_requests)
        check_lengths(value, limits.max_model_len, "prompt")
    return check_texts(value)


def check_texts(value: Any) -> Any:
    """Validates a text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(value, str) or is_token_list(value):
        return value
    several = value if isinstance(value, list) else []
    if several and (all(isinstance(item, str) for item in several) or all(map(is_token_list, several))):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def is_several(value: Any) -> bool:
    """Returns whether a value looks like a list of prompts, by its first item."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def check_lengths(value: Any, context: int, name: str) -> None:
    """Raises ApiError with status 400 for a list of more token ids than the context, without looking at them."""
    for prompt in value if is_several(value) else [value]:
        if isinstance(prompt, list) and len(prompt) > context:
            raise long_prompt(len(prompt), context, name)


def too_many_answers(count: int, limit: int) -> ApiError:
    message = f"{count} answers in one request; this server takes at most {limit}."
    return ApiError(400, message, "prompt", "too_many_answers")


def long_prompt(num_tokens: int, context: int, name: str = "prompt") -> ApiError:
    return ApiError(
        400,
        f"The prompt has {num_tokens} tokens, but the context is {context} tokens and one must be left for the answer. "
        "Shorten the prompt.",
        name,
        "context_length_exceeded",
    )


def separate_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Returns the prompts of a field that holds one or several."""
    return list(prompt) if is_several(prompt) else [prompt]


def check_stop(value: Any) -> Any:
    """Validates stop strings: none, one or a few, not empty. Raises ValueError."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) > MAX_STOP_STRINGS or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    return value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="changes nothing: streams are not padded")
    continuous_usage_stats: OnlyFalse | None = Field(None, description="token counts are in the last chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Queueing and sending of the answers to a request.

    Attributes:
        model: name of the model, or of an adapter.
        warnings: what was not followed, by field.
    """

    model: str
    priority: int
    cache_salt: str
    user: str | None
    num_answers: int
    stream: bool
    include_usage: bool
    warnings: Mapping[str, str] = field(default_factory=dict)


class GenerationRequest(StructuredFields, SteeringFields, FilterFields, AcceptedFields, DefaultFields):
    """Fields of completions and chat. A field that is null has its default."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    # Powers of two: descriptions hold bounds as floats.
    seed: int | None = Field(None, ge=-MAX_SEED - 1, lt=MAX_SEED + 1, description="negative ones count from 2^63")
    stop: Annotated[Stop, BeforeValidator(check_stop)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="alternatives to report for each token of the prompt; not with stream"
    )
    user: str | None = Field(None, description="written to the server's log with the request's id")

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only together with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not streamed; leave stream out")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def delivery(self) -> Delivery:
        return Delivery(
            model=self.model,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            user=self.user,
            num_answers=self.num_answers,
            stream=bool(self.stream),
            include_usage=self.include_usage,
        )

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
        return self.prompt_logprobs

    def sampling_params(
        self,
        num_prompt_tokens: int,
        context: int,
        default_tokens: int | None,
        words: EncodedWords = EncodedWords(),
    ) -> SamplingParams:
        """Returns the sampling parameters with OpenAI's defaults; `default_tokens=None` is the rest of the context.

        Args:
            words: token ids of texts in the body.

        Raises:
            ApiError: 400 if prompt and output do not fit in `context` tokens, with the numbers.
        """
        rest = context - num_prompt_tokens
        self.check_fits(num_prompt_tokens, context)
        return SamplingParams(
            max_tokens=min(rest, default_tokens or rest) if self.token_limit is None else self.token_limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed & MAX_SEED,
            n=self.num_answers,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=LogitBias.of((int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            min_tokens=self.min_tokens or 0,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=words.bad_words,
            dry_breakers=words.dry_breakers,
            **self.filter_params(),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=self.grammar,
        )

    def check_fits(self, num_prompt_tokens: int, context: int) -> None:
        """Raises ApiError with status 400 if prompt and output exceed the context."""
        rest = context - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise ApiError(400, "The prompt is empty: it has no tokens.", "prompt", "empty_prompt")
        if rest < (0 if self.token_limit == 0 else 1):
            raise long_prompt(num_prompt_tokens, context)
        if self.token_limit and self.token_limit > rest:
            raise ApiError(
                400,
                f"The prompt's {num_prompt_tokens} tokens and max_tokens={self.token_limit} exceed the context of "
                f"{context} tokens. Ask for at most {rest} tokens or shorten the prompt.",
                "max_tokens",
                "context_length_exceeded",
            )


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[Prompt, BeforeValidator(check_prompt)] = Field(
        description="one or several; at most as many as the server's queue holds (--max-requests), "
        "each of at most as many tokens as the context"
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0, description="0 only computes the prompt, to score it with echo")
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its own to a prompt, such as a beginning token; true is the default"
    )
    echo: bool | None = Field(None, description="return the prompt before the answer; with logprobs, score it too")

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> CompletionRequest:
        both = {self.logprobs, self.prompt_logprobs} - {None}
        if self.echo and len(both) > 1:
            raise ValueError("with echo logprobs and prompt_logprobs must be equal; give one number")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
