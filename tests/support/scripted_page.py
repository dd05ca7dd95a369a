"""An engine that says what a test wants, and what a test does with the page in front of it."""

import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from compress.common.errors import RequestError
from runtime.core.request import Delta, FinishReason, SamplingParams, TokenLogprobs
from runtime.engine.engine_client import Health

MARKUP = '<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> & "quoted" ü 🙂 日本\n  two  spaces'
END = ord("\x03")


class ByteTokens:
    """Token ids are bytes; without `has_template` there are no conversations."""

    has_template = True
    chat_template = ""
    template_variables: ClassVar[frozenset[str]] = frozenset()
    special_ids: ClassVar[dict[str, int]] = {}

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: list[dict[str, str]], **variables: Any) -> str:
        if not self.has_template:
            raise RequestError("this model has no chat template", "use completions with a plain prompt")
        return "".join(message["content"] for message in messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == END else bytes([token_id])


class ScriptedEngine:
    """Says `answer`, one byte per token, text when a character is whole; then fails when told to."""

    def __init__(self) -> None:
        self.answer = MARKUP
        self.error = ""
        self.health = Health(True, "", 0, 0, 0.0)
        self.metrics = ""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check(self) -> Health:
        return self.health

    async def render_metrics(self, model_name: str = "") -> str:
        return self.metrics

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str = "", **options: Any
    ) -> AsyncGenerator[list[Delta], None]:
        tokens, held = list(self.answer.encode()), b""
        for i, token in enumerate([*tokens, END], 1):
            found = TokenLogprobs(math.log(0.5), ((token, math.log(0.5)), (ord("<"), math.log(0.25))))
            held += bytes([token]) if token != END else b""
            text = held.decode("utf-8", errors="ignore")
            held = b"" if text else held
            reason = FinishReason.STOP if i > len(tokens) else None
            if reason and self.error:
                yield [Delta(request_id, finish_reason=FinishReason.ERROR, error=self.error)]
                return
            logprobs = [] if sampling.logprobs is None else [found]
            counts = {"num_output_tokens": i, "num_prompt_tokens": len(prompt)}
            yield [Delta(request_id, text, [token], logprobs, reason, **counts)]


def ask(page: Any, text: str, ends: str = "done") -> Any:
    page.fill("#message", text)
    page.click("#send")
    return ended(page, ends)


def ended(page: Any, ends: str = "done") -> Any:
    """The last turn, when its answer is complete and kept."""
    page.wait_for_selector(f".turn:last-child[data-state={ends}]")
    wait_until_kept(page)
    return page.locator(".turn").last


def wait_until_kept(page: Any) -> None:
    page.wait_for_selector("#kept[aria-busy=false]", state="attached")
