"""One request over HTTP, with the time of everything that came back."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from runtime.benchmark.http_client import Address, Response, request
from runtime.benchmark.workload import Job


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are seconds since the run began.

    Attributes:
        start: when it was due (open loop) or sent (closed loop).
        chunk_times: arrivals of streamed text. One chunk is one step of the engine and may hold several tokens.
        output_tokens: as the server's usage says, not as many as there were chunks.
        status: of HTTP; 0 without an answer.
        error: what went wrong; empty when all is well.
    """

    start: float
    end: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first text."""
        return self.chunk_times[0] - self.start

    @property
    def e2e(self) -> float:
        """Seconds from the start to the end of the answer."""
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [after - before for before, after in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        later = self.output_tokens - 1
        return (self.chunk_times[-1] - self.chunk_times[0]) / later if later > 0 else None


@dataclass(slots=True)
class Client:
    """Sends jobs to one server and notes times on one clock.

    Attributes:
        model: what the server calls it.
        timeout: seconds for a whole request.
    """

    address: Address
    model: str
    timeout: float = 600.0
    began: float = field(default_factory=time.perf_counter)
    num_active: int = 0
    peak_active: int = 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    async def send(self, job: Job, start: float | None = None) -> Record:
        """The record of one streamed request; failures are in the record, never raised."""
        record = Record(self.now if start is None else start)
        self.num_active += 1
        self.peak_active = max(self.peak_active, self.num_active)
        try:
            async with asyncio.timeout(self.timeout):
                await self._stream(job, record)
        except TimeoutError:
            record.error = f"no complete answer within {self.timeout:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self.num_active -= 1
            record.end = self.now
        return record

    async def _stream(self, job: Job, record: Record) -> None:
        shared = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        async with request(self.address, "POST", job.path, {**job.body, **shared}) as response:
            record.status = response.status
            if response.status != 200:
                record.error = _error_message(await response.body())
                return
            await self._read(response, record)
        if not record.chunk_times:  # tokens without a text, such as end tokens: they came by the end
            record.chunk_times.append(self.now)

    async def _read(self, response: Response, record: Record) -> None:
        async with aclosing(response.events()) as events:
            async for data in events:
                now = self.now
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    record.error = str(chunk["error"].get("message", chunk["error"]))
                    return
                if _has_text(chunk):
                    record.chunk_times.append(now)
                if chunk.get("usage"):
                    _note_usage(record, chunk["usage"])
        record.error = "the stream broke off"


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk["choices"])


def _note_usage(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens = usage["prompt_tokens"]
    record.output_tokens = usage["completion_tokens"]
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error_message(body: bytes) -> str:
    """The message of an OpenAI error object, or the beginning of whatever came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
