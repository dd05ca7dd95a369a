"""Choices of chats as OpenAI's API writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.server.logprobs import chat_logprobs
from runtime.server.service import Tokenizer
from runtime.server.streaming import Output
from runtime.types import Delta, FinishReason, TokenLogprobs


@dataclass
class ChatShape:
    """Choices of `chat.completion` objects and their chunks."""

    tokenizer: Tokenizer
    with_logprobs: bool
    num_choices: int
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self.chunk(index, {"role": "assistant", "content": ""}) for index in range(self.num_choices)]

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs):
            return []
        return [self.chunk(index, {"content": delta.text}, self.write_logprobs(delta.token_ids, delta.logprobs))]

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.chunk(index, {}, None, reason)

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.write_logprobs(output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def write_logprobs(self, token_ids: list[int], found: list[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, zip(token_ids, found, strict=True)) if self.with_logprobs else None

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
