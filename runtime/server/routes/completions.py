"""`/v1/completions`."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason, SamplingParams, TokenLogprobs
from runtime.server.answers import FramedPart, Part, text_json
from runtime.server.intake import ServedText, described
from runtime.server.prompt_logprobs import write_prompt_logprobs
from runtime.server.protocol.field_warnings import schema_warnings
from runtime.server.protocol.generation import (
    CompletionRequest,
    Delivery,
    separate_prompts,
)
from runtime.server.protocol.words import encode_words
from runtime.server.response_models import (
    MAY_STREAM,
    CompletionLogprobs,
    CompletionResponse,
    json_number,
    to_json,
    token_text,
)
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Service
from runtime.text.answer_form import ReasoningCounter
from runtime.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


MAX_SKIPPED_BYTES = 8
"""Distance up to which a prompt token is searched in the text."""


Columns = dict[str, Iterator[Any]]
"""The lists of `CompletionLogprobs`, each computed as it is written: a long prompt has a million alternatives."""
COLUMNS = to_json({name: ["%s"] for name in CompletionLogprobs.__annotations__}).replace('"%s"', "%s")


class LogprobsWriter:
    """Writes `logprobs` of one completion choice incrementally; offsets count characters from the start of its text.

    Args:
        hidden: ids of tokens that are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.hidden = hidden
        self.start = 0
        self.counter = CharacterCounter()
        self.texts: dict[int, str] = {}

    def write(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> str:
        """Returns the log-probabilities of new tokens of the answer in JSON."""
        tops = [self.top(token_id, each).items() for token_id, each in zip(token_ids, found, strict=True)]
        columns = (
            ",".join([text_json(self.text(token_id)) for token_id in token_ids]),
            ",".join([str(json_number(each.logprob)) for each in found]),
            ",".join([f"{{{','.join([f'{text_json(text)}:{logprob}' for text, logprob in top])}}}" for top in tops]),
            ",".join(map(str, self.offsets(token_ids))),
        )
        return COLUMNS % columns

    def columns(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs], offsets: Iterator[int]) -> Columns:
        """Writes null for the first token if nothing was found for it."""
        first = len(token_ids) - len(found)
        top = (self.top(token_id, each) for token_id, each in zip(token_ids[first:], found, strict=True))
        return {
            "tokens": (self.text(token_id) for token_id in token_ids),
            "token_logprobs": chain(repeat(None, first), (json_number(each.logprob) for each in found)),
            "top_logprobs": chain(repeat(None, first), top),
            "text_offset": offsets,
        }

    def prompt_columns(self, text: str, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> Columns:
        """Returns the log-probabilities of a prompt that precedes the answer as `text`; the first token has none.

        Args:
            found: log-probabilities of every token but the first.
        """
        self.start = len(text)
        return self.columns(token_ids, found, self.prompt_offsets(text.encode(), token_ids))

    def offsets(self, token_ids: Sequence[int]) -> Iterator[int]:
        for token_id in token_ids:
            yield self.start + self.counter.count
            if token_id not in self.hidden:
                self.counter.add(self.tokenizer.token_bytes(token_id))

    def prompt_offsets(self, raw_text: bytes, token_ids: Sequence[int]) -> Iterator[int]:
        offset = place = 0
        for token_id in token_ids:
            yield offset
            stop = end_of(self.tokenizer.token_bytes(token_id), raw_text, place)
            offset += count_characters(raw_text[place:stop])
            place = stop

    def text(self, token_id: int) -> str:
        if (found := self.texts.get(token_id)) is None:
            self.texts[token_id] = found = token_text(self.tokenizer.token_bytes(token_id))
        return found

    def top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Returns alternatives by text, best first, with the sampled token; the best of tokens with equal text
        counts."""
        entries: dict[str, float] = {}
        for alternative, logprob in (*found.top, (token_id, found.logprob)):
            entries.setdefault(self.text(alternative), json_number(logprob))
        return entries


def join_columns(first: Columns | None, second: Columns) -> Columns:
    return second if first is None else {name: chain(first[name], column) for name, column in second.items()}


def end_of(token: bytes, text: bytes, place: int) -> int:
    """Returns the end of a prompt token in the text, searched from `place`; `place` if it cannot be found.

    The text omits a beginning-of-sequence token and a first space, and replaces parts of characters.
    """
    for raw in (token, token.lstrip(b" ")):
        found = text.find(raw, place, place + len(raw) + MAX_SKIPPED_BYTES)
        if found >= 0:
            return found + len(raw)
    return place


def count_characters(raw: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in raw)  # first bytes of characters


class CharacterCounter:
    """Counts characters of text that comes in pieces of UTF-8; one that has begun counts, and so does U+FFFD for
    bytes that belong to none."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_complete = 0

    def add(self, raw: bytes) -> None:
        self.num_complete += len(self.decoder.decode(raw))

    @property
    def count(self) -> int:
        begun, _ = self.decoder.getstate()
        return self.num_complete + bool(begun)


@dataclass
class EchoedPrompt:
    """A prompt to return before its answers. They share it: only the first delivers its log-probabilities."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass
class CompletionShape:
    """Choices of `text_completion` objects.

    Attributes:
        echoed: one prompt per choice; empty for no echo.
        with_logprobs: report them in every choice.
        scored: one prompt per choice whose log-probabilities are reported; empty for none.
        hidden: ids of tokens that are left out of the text.
    """

    tokenizer: Tokenizer
    echoed: list[EchoedPrompt]
    with_logprobs: bool
    scored: list[EchoedPrompt] = field(default_factory=list)
    hidden: Container[int] = ()
    writers: dict[int, LogprobsWriter] = field(default_factory=dict)
    id_prefix: str = "cmpl"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    reasoning: ReasoningCounter | None = None

    def opening(self) -> list[dict[str, Any]]:
        return []

    def prelude(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if not self.echoed:
            return None
        return self.choice(index, self.echoed[index].text, self.prompt_logprobs(index, delta))

    def beside(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        return {}

    def parts(self, index: int, delta: Delta) -> list[Part]:
        if not (delta.text or delta.logprobs):
            return []
        logprobs = (self.writer(index).write(delta.token_ids, delta.logprobs),) if self.with_logprobs else ()
        return [FramedPart(index, (text_json(delta.text), *logprobs), partial(self.choice, index))]

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.choice(index, "", None, reason)

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        text = self.echoed[index].text if self.echoed else ""
        choice = self.choice(index, text + output.text, self.all_logprobs(index, output), output.finish_reason)
        if not self.scored:
            return choice
        prompt = self.scored[index]
        prompt.logprobs = prompt.logprobs or output.prompt_logprobs
        found = write_prompt_logprobs(self.tokenizer, prompt.token_ids, prompt.logprobs)
        return choice | {"prompt_logprobs": found}

    def all_logprobs(self, index: int, output: Delta) -> Columns | None:
        if not self.with_logprobs:
            return None
        prompt, writer = self.prompt_logprobs(index, output), self.writer(index)
        return join_columns(prompt, writer.columns(output.token_ids, output.logprobs, writer.offsets(output.token_ids)))

    def prompt_logprobs(self, index: int, found: Delta) -> Columns | None:
        """Returns those of an echoed prompt, which the engine delivers with the first answer only."""
        if not self.with_logprobs or not self.echoed:
            return None
        prompt = self.echoed[index]
        prompt.logprobs = prompt.logprobs or found.prompt_logprobs
        return self.writer(index).prompt_columns(prompt.text, prompt.token_ids, prompt.logprobs)

    def writer(self, index: int) -> LogprobsWriter:
        return self.writers.setdefault(index, LogprobsWriter(self.tokenizer, self.hidden))

    def choice(
        self,
        index: int,
        text: str,
        logprobs: Columns | None = None,
        reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A checked body of `/v1/completions`.

    Attributes:
        texts: prompts to echo; empty for no echo.
    """

    delivery: Delivery
    prompts: list[array[int]]
    samplings: list[SamplingParams]
    texts: list[str]
    with_logprobs: bool
    scores_prompts: bool


def prepare_completion(served: ServedText, raw: bytes) -> PreparedCompletion:
    """Checks a body and tokenizes its prompts. Raises ApiError or RequestError."""
    body = served.parse(raw, CompletionRequest)
    served.check_model(body.model)
    prompts = separate_prompts(body.prompt)
    special = body.add_special_tokens is not False
    token_ids = served.encode_prompts(prompts, body.truncate_prompt_tokens, add_special_tokens=special)
    context, words = served.limits.max_model_len, encode_words(served.tokenizer, body.bad_words or (), body.breakers)
    samplings = [body.sampling_params(len(ids), context, DEFAULT_MAX_TOKENS, words) for ids in token_ids]
    kept = token_ids if body.truncate_prompt_tokens else prompts
    texts = [p if isinstance(p, str) else served.tokenizer.decode(p) for p in kept] if body.echo else []
    reports = body.logprobs is not None, body.prompt_logprobs is not None
    delivery = replace(body.delivery, warnings=schema_warnings(body))
    return PreparedCompletion(delivery, token_ids, samplings, texts, *reports)


@register(order=10, bodies=[CompletionRequest])
def completions_router(service: Service) -> APIRouter:
    """The route of completions."""
    router = APIRouter(route_class=PlainRoute)
    options: dict[str, Any] = {"responses": MAY_STREAM, "openapi_extra": described(CompletionRequest)}

    @router.post("/v1/completions", response_model=CompletionResponse, **options)
    async def create_completion(request: Request) -> Response:
        """Continues one or several prompts."""
        body = await service.intake.read(request, prepare_completion)
        echoed = [EchoedPrompt(*prompt) for prompt in zip(body.texts, body.prompts, strict=False)]
        each = [prompt for prompt in echoed for _ in range(body.delivery.num_answers)]
        shape = CompletionShape(service.tokenizer, each, body.with_logprobs)
        if body.samplings[0].skip_special_tokens:
            shape.hidden = frozenset(service.tokenizer.special_ids.values())
        if body.scores_prompts:
            prompts = [EchoedPrompt("", token_ids) for token_ids in body.prompts]
            shape.scored = [prompt for prompt in prompts for _ in range(body.delivery.num_answers)]
        return await service.respond(request, body.delivery, shape, body.prompts, body.samplings)

    return router
