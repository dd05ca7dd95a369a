"""Bodies of requests, read without delaying other requests.

Parsing, validating, rendering and tokenizing one long body takes seconds, most of them with the interpreter lock held,
so that not even a thread would leave the event loop and the engine alone. Long bodies are therefore prepared in a
process of their own, which starts with the first of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.message import Message
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from compress.common.errors import ToolkitError, sentences
from runtime.core.config import Limits
from runtime.engine.wire import leave_signals_to_parent, start_process
from runtime.server.errors import NO_OBJECT, RETRY_LATER, ApiError, describe_invalid
from runtime.server.native_memory import Trimmer, share_arenas
from runtime.server.protocol.strict import Strict
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger("runtime.server")

SHORT_BYTES = 2**11
"""Bodies below this length are prepared at once, most of them in less than a millisecond: a thread, which takes turns
with the event loop, would delay them more than that."""
SLOW_FIELDS = b'"dry_'
"""Beginning of the fields that search the whole vocabulary for texts."""
LONG_BYTES = 2**16
"""Bodies from this length on are prepared in the other process; shorter ones hold the interpreter lock briefly."""
LONGEST_WAIT = 86400.0
"""Seconds; what an operating system accepts."""

Body = TypeVar("Body", bound=Strict)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedText:
    """Properties of the served model that bodies are checked against.

    Attributes:
        adapters: paths of LoRA adapters by the names that requests may use instead of the model's.
        other_names: names of the other models of the server, which their own requests reach.
    """

    tokenizer: Tokenizer
    model_name: str
    limits: Limits
    adapters: dict[str, Path] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()

    def parse(self, raw: bytes, kind: type[Body]) -> Body:
        """Returns a validated body. Raises ApiError with status 400 for an invalid one."""
        try:
            found = json.loads(raw)
        except json.JSONDecodeError as error:
            message = f"The body is not valid JSON: {error.msg} at character {error.pos}." if raw else NO_OBJECT
            raise ApiError(400, message) from None
        except ValueError as error:  # bytes that are not text, or an integer of thousands of digits
            raise ApiError(400, sentences(f"The body cannot be read: {error}")) from None
        return self.validate(found, kind)

    def validate(self, found: Any, kind: type[Body]) -> Body:
        """Returns a body made of JSON. Raises ApiError with status 400 for an invalid one."""
        try:
            return kind.model_validate(found, context=self)
        except ValidationError as error:
            found_errors = error.errors(include_url=False, include_input=False)
            raise ApiError(400, *describe_invalid(found_errors, found)) from None

    def check_model(self, name: str) -> None:
        """Raises ApiError with status 404 unless `name` is the served model, or one of its adapters."""
        if name != self.model_name and name not in self.adapters:
            names = " or ".join(f"'{each}'" for each in (self.model_name, *self.other_names))
            raise ApiError(404, f"The model '{name}' is not served here. Use {names}.", "model", "model_not_found")

    def encode(self, text: str, *, add_special_tokens: bool = True, keep: int | None = None) -> array[int]:
        """Returns the token ids of a prompt, int32, or the last `keep` of them; refuses far too long ones early.

        Raises:
            LongPromptError: it far exceeds the context.
        """
        limit = None if keep else self.limits.max_model_len
        found = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit)
        return array("i", found[-keep:] if keep else found)

    def encode_pieces(self, texts: Sequence[str], keep: int | None = None) -> array[int]:
        """Returns the token ids of a prompt whose pieces are tokenized one by one, or the last `keep` of them."""
        found = array("i")
        for text in texts:
            found += self.encode(text, add_special_tokens=False, keep=keep)
        return found[-keep:] if keep else found

    def encode_prompts(
        self, prompts: Sequence[str | list[int]], keep: int | None = None, *, add_special_tokens: bool = True
    ) -> list[array[int]]:
        """Returns the token ids of each prompt; the last `keep` of them. Raises the errors of `encode`."""
        last = slice(-keep if keep else None, None)
        return [
            self.encode(each, add_special_tokens=add_special_tokens, keep=keep)
            if isinstance(each, str)
            else array("i", each[last])
            for each in prompts
        ]


@lru_cache(maxsize=64)
def is_json(content_type: str) -> bool:
    """Returns whether a header announces JSON."""
    header = Message()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def described(kind: type[Strict]) -> dict[str, Any]:
    """Returns the published description of a route's body, which the route reads itself."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


Prepare = Callable[[ServedText, bytes], T]
"""Turns a raw body into what a route needs. A function of a module, so that another process can import it."""


class Intake:
    """Prepares bodies: short ones at once, others in a thread, long ones one after the other in another process."""

    def __init__(self, served: ServedText) -> None:
        self.served = served
        self._num_waiting = 0
        self._caller = ThreadPoolExecutor(1, "long bodies")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    async def read(self, request: Request, prepare: Prepare[T]) -> T:
        """Returns what `prepare` makes of the body of a request.

        Raises:
            ApiError: the body is invalid, or too many long ones are waiting.
            RequestError: the model's tokenizer or chat template refuses it.
        """
        raw = await request.body()
        if not is_json(request.headers.get("content-type", "text/plain")):
            raise ApiError(400, NO_OBJECT)
        if len(raw) < SHORT_BYTES and SLOW_FIELDS not in raw:
            return attempt(prepare, self.served, raw)
        if len(raw) < LONG_BYTES:
            return await asyncio.to_thread(attempt, prepare, self.served, raw)
        with self._place():
            return await asyncio.get_running_loop().run_in_executor(self._caller, self._ask, prepare, raw)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
        self._caller.submit(self._end_process)
        self._caller.shutdown(wait=False)

    @contextmanager
    def _place(self) -> Iterator[None]:
        limit = self.served.limits.max_requests
        if self._num_waiting >= limit:
            message = f"The queue is full: {limit} long bodies are waiting to be read. Try again later."
            raise ApiError(429, message, code="queue_full", headers=RETRY_LATER)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _ask(self, prepare: Prepare[T], raw: bytes) -> T:
        """Has the process prepare a body. Runs in the only thread that uses the process."""
        seconds = min(self.served.limits.queue_seconds, LONGEST_WAIT)
        try:
            connection = self._connect()
            connection.send((prepare, raw, self.served.adapters))
            if not connection.poll(seconds):
                self._end_process()
                raise ApiError(
                    503, f"The body was not read after {seconds:g} s.", code="queue_timeout", headers=RETRY_LATER
                )
            outcome: T | Exception = connection.recv()
        except (EOFError, OSError) as error:
            self._end_process()
            logger.error("the process that reads long bodies ended: %r", error)
            raise ApiError(
                503, "The body could not be read. Try again.", code="aborted", headers=RETRY_LATER
            ) from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _connect(self) -> Connection:
        """Returns the connection to the process, which is started if there is none."""
        if self._connection is None:
            mine, theirs = socket.socketpair()
            self._process = start_process("runtime.server.intake:work", theirs)
            self._connection = Connection(mine.detach())
            self._connection.send(self.served)
        return self._connection

    def _end_process(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None and connection is not None:
            process.kill()
            process.wait()
            connection.close()


def work(end: int) -> None:
    """Prepares bodies until the other end of the connection is closed. Runs in a process of its own.

    Args:
        end: file descriptor of this end.
    """
    leave_signals_to_parent()
    os.nice(NICENESS)
    share_arenas()
    with Connection(end) as connection, suppress(EOFError):
        served, trimmer = connection.recv(), Trimmer()
        while True:
            prepare, raw, adapters = connection.recv()
            connection.send(outcome_of(prepare, replace(served, adapters=adapters), raw))
            trimmer.look(is_idle=True)


NICENESS = 10
"""The engine's threads come first."""


def attempt(prepare: Prepare[T], served: ServedText, raw: bytes) -> T:
    """Returns the prepared body. Raises ApiError with status 400 for one that is nested too deeply."""
    try:
        return prepare(served, raw)
    except RecursionError:
        message = "The body is nested too deeply to be read. Send a flatter one."
        raise ApiError(400, message, code="nested_too_deeply") from None


def outcome_of(prepare: Prepare[T], served: ServedText, raw: bytes) -> T | Exception:
    """Returns the prepared body, or the error, in a form that can be sent to another process."""
    try:
        return attempt(prepare, served, raw)
    except (ApiError, ToolkitError) as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())
