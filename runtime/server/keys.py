"""API keys with limits for each. Pure: the caller gives the time; keys are kept as digests and never logged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path

from compress.common.errors import ToolkitError, nearest
from compress.common.files import YamlPart, read_yaml
from runtime.server.errors import ApiError

DEFAULT_NAME = "default"
"""Name of the key of `--api-key`."""


@dataclass(slots=True)
class TokenBucket:
    """An amount that refills evenly to `per_minute`; spending more than is left delays the next use.

    Times are seconds of any clock that does not go back.
    """

    per_minute: int
    left: float = 0.0
    time: float = -math.inf  # full at the first use

    def refill(self, now: float) -> float:
        """Returns the amount that is left."""
        self.left = min(self.per_minute, self.left + (now - self.time) * self.per_minute / 60)
        self.time = now
        return self.left

    def spend(self, amount: int, now: float) -> None:
        self.left = self.refill(now) - amount

    def delay(self, now: float) -> int:
        """Returns the whole seconds until at least 1 is left; 0 if it is."""
        return max(0, math.ceil((1 - self.refill(now)) * 60 / self.per_minute))


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None means no limit.

    Attributes:
        max_requests: sequences running and waiting at once.
        requests_per_minute: requests that are not GET.
        tokens_per_minute: tokens of prompts and answers, charged when a request ends.
    """

    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


NAMES = ("name", "key", *(limit.name for limit in fields(KeyLimits)))


@dataclass(slots=True)
class TokenCount:
    """Tokens that a request used, whether its answer was complete or not."""

    prompt: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(slots=True)
class Account:
    """The holder of a key, and what it has used."""

    name: str
    limits: KeyLimits = KeyLimits()
    num_active: int = 0
    buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = {"requests": self.limits.requests_per_minute, "tokens": self.limits.tokens_per_minute}
        self.buckets = {unit: TokenBucket(limit) for unit, limit in both.items() if limit is not None}

    def start_request(self, now: float) -> None:
        """Counts a request. Raises ApiError with status 429 if requests or tokens of this minute are used up."""
        for unit, bucket in self.buckets.items():
            if seconds := bucket.delay(now):
                raise self._refusal(f"{bucket.per_minute} {unit} per minute", seconds)
        if "requests" in self.buckets:
            self.buckets["requests"].spend(1, now)

    def charge(self, tokens: TokenCount, now: float) -> None:
        """Charges the tokens of a request that ended."""
        if "tokens" in self.buckets:
            self.buckets["tokens"].spend(tokens.total, now)

    @property
    def max_requests(self) -> int:
        """Most sequences at once."""
        return self.limits.max_requests or sys.maxsize

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Holds the places of `count` sequences. Raises ApiError: 429 if not enough are free, 400 if it never fits."""
        limit = self.max_requests
        if count > limit:
            message = f"{count} answers in one request; the key '{self.name}' may have {limit} at once."
            raise ApiError(400, message, "prompt", "too_many_answers")
        if self.num_active + count > limit:
            raise self._refusal(f"{limit} requests at once", 1)
        self.num_active += count
        try:
            yield
        finally:
            self.num_active -= count

    def _refusal(self, limit: str, seconds: int) -> ApiError:
        message = f"The key '{self.name}' is limited to {limit}. Try again in {seconds} s."
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


Accounts = Mapping[bytes, Account]
"""Accounts by the digest of their key."""


def digest(key: str | bytes) -> bytes:
    """Returns the SHA-256 digest of a key in UTF-8, without spaces around it: headers lose them."""
    return sha256((key.encode() if isinstance(key, str) else key).strip()).digest()


class ApiKeys:
    """The keys of a server.

    A digest is looked up in a dictionary: the time tells nothing of a key, since no client chooses its digest.

    Args:
        load: returns the accounts; called now and by `reload`.
    """

    def __init__(self, load: Callable[[], Accounts]) -> None:
        self.load = load
        self.accounts = load()

    def find(self, authorization: str) -> Account | None:
        """Returns the account for a header `Authorization`; schemes have no case (RFC 9110)."""
        scheme, _, key = authorization.partition(" ")
        return self.accounts.get(digest(key.encode("latin-1"))) if scheme.lower() == "bearer" else None

    def reload(self) -> None:
        """Loads the accounts again; those with the same name and limits go on. Raises ToolkitError, changes nothing."""
        current = {(account.name, account.limits): account for account in self.accounts.values()}
        self.accounts = {
            key: current.get((account.name, account.limits), account) for key, account in self.load().items()
        }


def load_accounts(api_key: str | None, file: Path | None) -> Accounts:
    """Returns the accounts of a single key without limits, and of a file.

    Raises:
        ToolkitError: a key is empty or given twice, or the file is wrong; it names the place.
    """
    accounts: dict[bytes, Account] = {}
    if api_key is not None:
        if not api_key.strip():
            problem = "--api-key is empty, or its environment variable RUNTIME_API_KEY"
            raise ToolkitError(problem, "Use --api-key KEY, or leave out both to serve without a key")
        accounts[digest(api_key)] = Account(DEFAULT_NAME)
    for place, key, account in () if file is None else read_accounts(file):
        if digest(key) in accounts or account.name in [other.name for other in accounts.values()]:
            raise ToolkitError(f"{place}: the name {account.name!r} or its key is given twice", "Remove one of them")
        accounts[digest(key)] = account
    return accounts


def read_accounts(file: Path) -> Iterator[tuple[str, str, Account]]:
    """Yields place, key and account for each entry of a file of keys. Raises ToolkitError."""
    root = read_yaml(file)
    if not isinstance(root.value, list) or not root.value:
        raise ToolkitError(f"{file} has no list of keys", "Write for each '- {name: NAME, key: KEY}'")
    for entry in root.value:
        yield entry.place, *_read_account(entry)


def _read_account(entry: YamlPart) -> tuple[str, Account]:
    if not isinstance(entry.value, dict):
        raise ToolkitError(f"{entry.place} is not a mapping", "Write '- {name: NAME, key: KEY}'")
    for name in entry.value.keys() - set(NAMES):
        raise ToolkitError(f"{entry.value[name].place}: unknown field", nearest(name, NAMES, "Fields"))
    texts = {name: part.text(name).strip() for name, part in entry.value.items()}
    for name in ("name", "key"):
        if not texts.get(name):
            raise ToolkitError(f"{entry.place} has no {name}, or an empty one", f"Write '{name}: VALUE'")
    key, name = texts.pop("key"), texts.pop("name")
    return key, Account(name, KeyLimits(**{limit: _number(entry.value[limit], limit) for limit in texts}))


def _number(part: YamlPart, name: str) -> int:
    text = part.text(name)
    if not text.isdecimal() or int(text) < 1:
        raise ToolkitError(f"{part.place}: {name} is {text!r}", "Write a whole number of at least 1, or leave it out")
    return int(text)
