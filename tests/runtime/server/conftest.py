"""A server over a real socket, around an engine that is small enough to see through."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import FastAPI
from servers import serving, serving_demo

from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams, TokenLogprobs
from runtime.engine.engine import Engine
from runtime.engine.engine_client import Health
from runtime.engine.metrics import Metrics
from runtime.server.app import create_app
from runtime.server.intake import ServedText
from runtime.server.keys import ApiKeys, load_accounts
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer


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


LIMITS = Limits(max_model_len=100, max_requests=4, max_body_bytes=10_000)
API_KEY = "open sesame"


@pytest.fixture
def served() -> ServedText:
    """The model that `api` serves, as bodies are checked against it."""
    return ServedText(ByteTokenizer(), "alphabet", LIMITS)


@pytest.fixture(scope="session")
def shared_engine() -> AlphabetEngine:
    return AlphabetEngine()


@pytest.fixture
def engine(shared_engine: AlphabetEngine) -> Iterator[AlphabetEngine]:
    """The engine that serves `api`, as new."""
    yield shared_engine
    shared_engine.reset()


def alphabet_app(
    engine: AlphabetEngine,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    tokenizer: ByteTokenizer | None = None,
    **options: Any,
) -> FastAPI:
    if api_key is not None:
        options["keys"] = ApiKeys(lambda: load_accounts(api_key, None))
    tokenizer = tokenizer or ByteTokenizer()
    return create_app(engine, tokenizer, "alphabet", limits, **options)


@pytest.fixture
def alphabet_parts() -> Callable[..., tuple[FastAPI, AlphabetEngine, ByteTokenizer]]:
    """Makes applications that are not served yet, with engine and tokenizer; takes `alphabet_app`'s options."""

    def make(**options: Any) -> tuple[FastAPI, AlphabetEngine, ByteTokenizer]:
        engine, tokenizer = AlphabetEngine(), ByteTokenizer()
        return alphabet_app(engine, tokenizer=tokenizer, **options), engine, tokenizer

    return make


@pytest.fixture(scope="session")
def new_alphabet_app() -> Callable[..., FastAPI]:
    """Takes `alphabet_app`'s options, for tests that serve the application in their own way."""
    return lambda **options: alphabet_app(AlphabetEngine(), **options)


@pytest.fixture
def serve_alphabet() -> Iterator[Callable[..., tuple[str, AlphabetEngine]]]:
    """Starts servers of their own: takes `alphabet_app`'s options, and returns the URL and the engine."""
    with ExitStack() as servers:

        def serve(**options: Any) -> tuple[str, AlphabetEngine]:
            engine = AlphabetEngine()
            return servers.enter_context(serving(alphabet_app(engine, **options))), engine

        yield serve


@pytest.fixture(scope="session")
def alphabet_url(shared_engine: AlphabetEngine) -> Iterator[str]:
    with serving(alphabet_app(shared_engine)) as url:
        yield url


@pytest.fixture(scope="session")
def guarded_url() -> Iterator[str]:
    with serving(alphabet_app(AlphabetEngine(), api_key=API_KEY)) as url:
        yield url


@pytest.fixture(scope="session")
def demo_server() -> Iterator[tuple[str, Engine, Tokenizer]]:
    """The demo model in float64: URL, engine and tokenizer."""
    with serving_demo(prefill_chunk=32) as served:
        yield served


@pytest.fixture
def api(engine: AlphabetEngine, alphabet_url: str) -> Iterator[httpx.Client]:
    """A client of a server called `alphabet`, without an API key."""
    with httpx.Client(base_url=alphabet_url, timeout=20) as client:
        yield client


@pytest.fixture
def guarded_api(guarded_url: str) -> Iterator[httpx.Client]:
    """A client of the same kind of server with the API key `open sesame`."""
    with httpx.Client(base_url=guarded_url, timeout=20) as client:
        yield client


@pytest.fixture
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a traceback was logged."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [record.getMessage() for record in records if record.exc_info] == []


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)

    return wait
