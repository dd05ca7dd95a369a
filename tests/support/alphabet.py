"""An engine that is small enough to see through, and its tokenizer."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams, TokenLogprobs
from runtime.engine.engine_client import Health
from runtime.engine.metrics import Metrics


class ByteTokenizer:
    """Token ids are the bytes of the text. Its chat template knows no tools. Tests close `gate` to make it slow."""

    chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    special_ids: ClassVar[dict[str, int]] = {}
    template_variables: ClassVar[set[str]] = {"messages"}
    special_tokens: ClassVar[dict[str, str]] = {"eos_token": "~"}
    vocab_size = 256

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        self.gate.wait(60)
        return list(text.encode())

    def render_chat(self, messages: list[dict[str, str]], **variables: object) -> str:
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def tokens_with(self, text: str) -> list[int]:
        return list(text.encode()) if len(text.encode()) == 1 else []


class AlphabetEngine:
    """Continues every prompt with the alphabet, one letter per step, starting at the prompt's last byte plus one;
    further answers to the same prompt start ten letters later each.

    `gate` is closed by tests that want requests to hang; `active` are the requests that were not freed yet.
    """

    def __init__(self) -> None:
        self.running = False
        self.gate = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.failure = ""
        self.active: set[str] = set()
        self.seen: list[SamplingParams] = []
        self.options: list[RequestOptions] = []
        self.fail_after: int | None = None
        self.close_gate_at: int | None = None
        self.gate.set()

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    async def render_metrics(self, model_name: str) -> str:
        return Metrics().render()

    def check(self) -> Health:
        return Health(not self.failure, self.failure, len(self.active), 0, 0.0)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = RequestOptions(),
    ) -> AsyncGenerator[list[Delta], None]:
        assert request_id is not None
        assert request_id not in self.active
        self.seen.append(sampling)
        self.options.append(options)
        self.active.add(request_id)
        try:
            if options.embed or sampling.max_tokens == 0:
                for index in range(sampling.n):
                    yield [self.prompt_only(request_id, prompt_token_ids, sampling, options, index)]
            for i in range(0 if options.embed else sampling.max_tokens):
                if i == self.close_gate_at:
                    self.gate.clear()
                while self.running and not self.gate.is_set():
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0)
                if not self.running:
                    for index in range(sampling.n):
                        yield [Delta(request_id, finish_reason=FinishReason.ABORT, index=index)]
                    return
                if i == self.fail_after:
                    yield [Delta(request_id, finish_reason=FinishReason.ERROR, error="logits are not finite")]
                    return
                for index in range(sampling.n):
                    yield [self.letter(request_id, prompt_token_ids, sampling, i, index)]
        finally:
            self.active.discard(request_id)

    def prompt_only(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, options: RequestOptions, index: int
    ) -> Delta:
        return Delta(
            request_id,
            index=index,
            finish_reason=FinishReason.STOP if options.embed else FinishReason.LENGTH,
            num_prompt_tokens=len(prompt),
            prompt_logprobs=self.prompt_logprobs(prompt, sampling) if index == 0 else [],
            embedding=[len(prompt) / 3, float(prompt[0]), -1.5] if options.embed else None,
        )

    def prompt_logprobs(self, prompt: Sequence[int], sampling: SamplingParams) -> list[TokenLogprobs]:
        if sampling.prompt_logprobs is None:
            return []
        scores = [-(i + 1) / 8 for i in range(len(prompt) - 1)]
        return [TokenLogprobs(score, ((token, score),)) for token, score in zip(prompt[1:], scores, strict=True)]

    def letter(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, i: int, index: int) -> Delta:
        token = ord("a") + (prompt[-1] + 1 + i + 10 * index) % 26
        logprobs = [TokenLogprobs(-0.5, ((token, -0.5), (1, float("-inf")))[: sampling.logprobs])]
        last = i + 1 == sampling.max_tokens
        return Delta(
            request_id,
            text=chr(token),
            token_ids=[token],
            logprobs=logprobs if sampling.logprobs is not None else [],
            finish_reason=FinishReason.LENGTH if last else None,
            num_prompt_tokens=len(prompt),
            num_output_tokens=i + 1,
            index=index,
            prompt_logprobs=self.prompt_logprobs(prompt, sampling) if i == index == 0 else [],
        )
