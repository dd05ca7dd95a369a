"""What every route shares: the engine, the tokenizer, the limits, and how a request becomes prompts and deltas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from runtime.sampling_params import SamplingParams
from runtime.server.errors import ApiError
from runtime.server.generation import Engine, Generations, Job
from runtime.server.limits import Limits
from runtime.server.logprobs import TokenBytes
from runtime.server.protocol import GenerationRequest
from runtime.server.streaming import Answer, Shape, respond
from runtime.types import RequestOptions

logger = logging.getLogger("runtime.server")


class Tokenizer(TokenBytes, Protocol):
    """The served model's tokenizer as the server uses it."""

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
    """One served model. Lives on the event loop's thread."""

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
        """Raises ApiError with status 404 for another name than that of the served model."""
        if name != self.model_name:
            raise ApiError(
                404, f"The model '{name}' is not served here. Use '{self.model_name}'.", "model", "model_not_found"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Takes a while for long ones; those that cannot fit are refused sooner.

        Raises:
            LongPromptError: it exceeds the context by far.
        """
        limit = self.limits.max_model_len
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit)

    def encode_prompts(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Token ids of each prompt. Raises what `encode` does."""
        return [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def sampling(self, body: GenerationRequest, num_prompt_tokens: int, default_tokens: int | None) -> SamplingParams:
        """The request's sampling with OpenAI's defaults; `default_tokens=None` is the rest of the context.

        Raises:
            ApiError: 400 when prompt and output do not fit in the context, with the numbers.
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
        """Raises ApiError with status 400 when prompt and output exceed the context, whose `rest` tokens are free."""
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
        """Generates `n` choices per prompt and answers in the request's way, at once or as a stream."""
        request_id = f"{shape.id_prefix}-{request.state.request_id}"
        options = RequestOptions(priority=body.priority or 0, cache_salt=body.cache_salt or "")
        jobs = [Job(f"{request_id}-{i}", *job, options) for i, job in enumerate(zip(prompts, samplings, strict=True))]
        logger.info("request %s: user %r, prompts of %s tokens", request_id, body.user, [len(p) for p in prompts])
        envelope = {"id": request_id, "created": int(time.time()), "model": self.model_name}
        answer = Answer(envelope, shape, len(jobs) * body.num_answers, body.include_usage)
        return await respond(request, self.generations.run(jobs), answer, bool(body.stream), self.limits)
