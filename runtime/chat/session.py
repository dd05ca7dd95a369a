"""The engine's side of a conversation: each turn is one request, and the prefix cache knows the turns before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compress.checkpoint.errors import RequestError, ToolkitError
from runtime.chat.conversation import Conversation
from runtime.engine import Engine
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer
from runtime.types import Delta, FinishReason


@dataclass
class TurnFigures:
    """Of the last answer. Seconds count from the question."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0
    is_cut: bool = False

    def __str__(self) -> str:
        generating = self.seconds - self.first_seconds
        rate = f", {(self.output_tokens - 1) / generating:.1f} tokens/s" if self.output_tokens > 1 else ""
        prompt = f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached)"
        cut = "; the limit of tokens cut it" if self.is_cut else ""
        return f"{prompt}, {self.output_tokens} generated, the first after {self.first_seconds:.2f} s{rate}{cut}"


class Session:
    """Answers a conversation's questions with an engine of its own.

    Args:
        engine: nobody else may use it.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, conversation: Conversation) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.conversation = conversation
        self.figures = TurnFigures()

    def ask(self, question: str, is_stopped: Callable[[], bool]) -> Iterator[str]:
        """The answer in pieces. However it ends, the turn is kept with what was said, and the engine is free again.

        Args:
            is_stopped: asked after every step; True ends the answer.

        Raises:
            RequestError: the conversation does not fit in the context, or the template refuses it; nothing is kept.
            ToolkitError: the engine failed; nothing is kept.
        """
        token_ids = self.tokenizer.encode_chat(self.conversation.with_user(question))
        began, self.figures = time.perf_counter(), TurnFigures(len(token_ids))
        request_id = self.engine.add_request(token_ids, self._sampling(len(token_ids)))
        pieces: list[str] = []
        try:
            for delta in self._deltas(is_stopped):
                self._note(delta, time.perf_counter() - began)
                pieces.append(delta.text)
                yield delta.text
        finally:
            self.engine.abort(request_id)
        self.conversation.add_turn(question, "".join(pieces))

    def _sampling(self, num_prompt_tokens: int) -> SamplingParams:
        room = self.engine.runner.max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"the conversation has {num_prompt_tokens} tokens and the context {self.engine.runner.max_model_len}",
                "/reset begins anew",
            )
        sampling = self.conversation.sampling
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def _deltas(self, is_stopped: Callable[[], bool]) -> Iterator[Delta]:
        while self.engine.has_work and not is_stopped():
            for delta in self.engine.step():
                if delta.finish_reason is FinishReason.ERROR:
                    raise ToolkitError(f"the answer failed: {delta.error}", "Try --kernels reference --dtype float32")
                yield delta

    def _note(self, delta: Delta, seconds: float) -> None:
        figures = self.figures
        if not figures.output_tokens:
            figures.first_seconds = seconds
        figures.seconds = seconds
        figures.output_tokens, figures.cached_tokens = delta.num_output_tokens, delta.num_cached_tokens
        figures.is_cut = delta.finish_reason is FinishReason.LENGTH
