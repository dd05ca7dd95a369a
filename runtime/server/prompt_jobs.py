"""Requests that compute prompts and generate nothing."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import Request

from runtime.core.request import Delta, SamplingParams
from runtime.server.serving import Job, Service, account_of

JOBS_AT_ONCE = 32
"""Prompts of one request in flight at once; the others wait outside of the queue."""
NOTHING_SAMPLED = SamplingParams(max_tokens=0)


async def run_in_groups(service: Service, request: Request, jobs: list[Job]) -> list[Delta]:
    """Returns the only delta of each job, in order; runs a few at once. Raises ApiError."""
    found: list[Delta] = []
    at_once = min(JOBS_AT_ONCE, service.limits.max_requests, account_of(request).max_requests)
    for first in range(0, len(jobs), at_once):
        async with aclosing(service.run(jobs[first : first + at_once], request)) as deltas:
            found += [delta for _, delta in sorted([pair async for pair in deltas], key=lambda pair: pair[0])]
    return found
