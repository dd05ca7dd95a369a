"""The served model: a bounded queue before the engine, time limits, and the streams of deltas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from runtime.core.config import Limits
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine_thread import Health
from runtime.engine.output_processor import GRAMMAR_TOO_COMPLEX
from runtime.server.errors import ApiError
from runtime.server.protocol import GenerationRequest
from runtime.server.responses import Answer, Shape, TokenBytes, respond

logger = logging.getLogger("runtime.server")

RETRY_AFTER_SECONDS = 1


class Engine(Protocol):
    """The engine's thread as the server uses it. Closing the generator frees the request."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None,
        options: RequestOptions,
    ) -> AsyncGenerator[Delta, None]: ...

    def start(self) -> None: ...

    def stop(self) -> object: ...

    def check(self) -> Health: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its sampling parameters and serving options."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    options: RequestOptions


class Generations:
    """Runs jobs on the engine within `limits`. Used on the event loop's thread."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.num_active = 0

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Holds `count` places in the queue. Raises ApiError: 429 if it is full, 400 if `count` exceeds its size."""
        limit = self.limits.max_requests
        if count > limit:
            message = f"{count} answers in one request; this server takes at most {limit}."
            raise ApiError(400, message, "prompt", "too_many_answers")
        if self.num_active + count > limit:
            raise ApiError(
                429,
                f"The queue is full: {self.num_active} of {limit} requests are running or waiting. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self.num_active += count
        try:
            yield
        finally:
            self.num_active -= count

    async def run(self, jobs: list[Job]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields deltas of all jobs as they arrive, with the index of their choice, in order of prompts and answers.

        Closing it frees all jobs.

        Raises:
            ApiError: 429 if the queue is full; 500 if a sequence fails; 503 if the engine stops, or returns no token
                within `queue_seconds`; 504 after `request_seconds`.
            RequestError: the engine refuses a job.
        """
        with self.admit(sum(job.sampling.n for job in jobs)):
            streams = [
                self.engine.generate(job.prompt_token_ids, job.sampling, job.request_id, options=job.options)
                for job in jobs
            ]
            async with aclosing(in_time(merge(streams), self.limits)) as deltas:
                async for index, delta in deltas:
                    check_delta(delta)
                    yield index * jobs[index].sampling.n + delta.index, delta


def check_delta(delta: Delta) -> None:
    """Raises ApiError for a failed (400 or 500) or aborted (503) request."""
    if delta.finish_reason is FinishReason.ERROR:
        if delta.error == GRAMMAR_TOO_COMPLEX:
            raise ApiError(400, f"Generation stopped: {delta.error}. Simplify the grammar.", code="refused")
        logger.error("request %s failed: %s", delta.request_id, delta.error)
        raise ApiError(500, f"Generation failed: {delta.error}.", code="generation_failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "The server ended this request before it was complete: it is stopping.", code="aborted")


async def in_time(
    deltas: AsyncGenerator[tuple[int, Delta], None], limits: Limits
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yields the deltas while the first and the last of them are in time. Closing it closes them.

    Raises:
        ApiError: 503 or 504.
    """
    now = asyncio.get_running_loop().time()
    end = now + limits.request_seconds
    deadline = min(end, now + limits.queue_seconds)
    async with aclosing(deltas):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise out_of_time(limits, is_first=deadline < end) from None
            yield item
            deadline = end


def out_of_time(limits: Limits, is_first: bool) -> ApiError:
    """Returns the error 503 for a request without a first token, 504 for one in progress."""
    if is_first:
        message = f"No token after {limits.queue_seconds:g} s: the server is overloaded. Try again later."
        return ApiError(503, message, code="queue_timeout", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
    message = f"The request took longer than {limits.request_seconds:g} s. Ask for fewer tokens."
    return ApiError(504, message, code="request_timeout")


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Interleaves streams in order of arrival. Closing it closes them all."""
    if len(streams) == 1:  # the common case, without a task and a queue per token
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, stream, arrivals)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncGenerator[Delta, None], arrivals: asyncio.Queue) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                arrivals.put_nowait((index, delta))
        arrivals.put_nowait((index, None))
    except Exception as error:
        arrivals.put_nowait((index, error))


class Tokenizer(TokenBytes, Protocol):
    """The tokenizer as the server uses it."""

    special_tokens: Mapping[str, str]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> str: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Service:
    """The served model. Used on the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model_name: str,
        limits: Limits,
        render_metrics: Callable[[], str],
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.limits = limits
        self.render_metrics = render_metrics
        self.generations = Generations(engine, limits)

    def check_model(self, name: str) -> None:
        """Raises ApiError with status 404 unless `name` is the served model."""
        if name != self.model_name:
            raise ApiError(
                404, f"The model '{name}' is not served here. Use '{self.model_name}'.", "model", "model_not_found"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt. Slow for long prompts; refuses far too long ones early.

        Raises:
            LongPromptError: it far exceeds the context.
        """
        limit = self.limits.max_model_len
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit)

    def encode_prompts(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises the errors of `encode`."""
        return [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def sampling(self, body: GenerationRequest, num_prompt_tokens: int, default_tokens: int | None) -> SamplingParams:
        """Returns the sampling parameters with OpenAI's defaults; `default_tokens=None` is the rest of the context.

        Raises:
            ApiError: 400 if prompt and output do not fit in the context, with the numbers.
        """
        rest = self.limits.max_model_len - num_prompt_tokens
        self.check_fits(body, num_prompt_tokens, rest)
        return SamplingParams(
            max_tokens=min(rest, default_tokens or rest) if body.token_limit is None else body.token_limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            min_p=body.min_p or 0.0,
            seed=body.seed,
            n=body.num_answers,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.biases,
            stop=body.stop_strings,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_prompt_logprobs,
            grammar=body.grammar,
        )

    def check_fits(self, body: GenerationRequest, num_prompt_tokens: int, rest: int) -> None:
        """Raises ApiError with status 400 if prompt and output exceed the context, of which `rest` tokens are left."""
        context = self.limits.max_model_len
        if num_prompt_tokens == 0:
            raise ApiError(400, "The prompt is empty: it has no tokens.", "prompt", "empty_prompt")
        if rest < (0 if body.token_limit == 0 else 1):
            raise ApiError(
                400,
                f"The prompt has {num_prompt_tokens} tokens, but the context is {context} tokens and one must be left "
                "for the answer. Shorten the prompt.",
                "prompt",
                "context_length_exceeded",
            )
        if body.token_limit and body.token_limit > rest:
            raise ApiError(
                400,
                f"The prompt's {num_prompt_tokens} tokens and max_tokens={body.token_limit} exceed the context of "
                f"{context} tokens. Ask for at most {rest} tokens or shorten the prompt.",
                "max_tokens",
                "context_length_exceeded",
            )

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        shape: Shape,
        prompts: list[list[int]],
        samplings: list[SamplingParams],
    ) -> Response:
        """Generates `n` choices per prompt and answers, as one body or as a stream."""
        request_id = f"{shape.id_prefix}-{request.state.request_id}"
        options = RequestOptions(priority=body.priority or 0, cache_salt=body.cache_salt or "")
        jobs = [Job(f"{request_id}-{i}", *job, options) for i, job in enumerate(zip(prompts, samplings, strict=True))]
        logger.info("request %s: user %r, prompts of %s tokens", request_id, body.user, [len(p) for p in prompts])
        envelope = {"id": request_id, "created": int(time.time()), "model": self.model_name}
        answer = Answer(envelope, shape, len(jobs) * body.num_answers, body.include_usage)
        return await respond(request, self.generations.run(jobs), answer, bool(body.stream), self.limits)
