"""Requests that compute prompts and generate nothing."""

from __future__ import annotations

from fastapi import Request

from runtime.core.request import Delta, SamplingParams
from runtime.server.answers import each
from runtime.server.serving import Job, Service, account_of

JOBS_AT_ONCE = 32
"""Prompts of one request in flight at once; the others wait outside of the queue."""
NOTHING_SAMPLED = SamplingParams(max_tokens=0)


async def run_in_groups(service: Service, request: Request, jobs: list[Job]) -> list[Delta]:
    """Returns the only delta of each job, in order; runs a few at once. Raises ApiError."""
    found: list[Delta] = []
    at_once = min(JOBS_AT_ONCE, service.limits.max_requests, account_of(request).max_requests)
    for first in range(0, len(jobs), at_once):
        deltas = each(service.run(jobs[first : first + at_once], request))
        found += sorted([delta async for delta in deltas], key=lambda delta: delta.index)
    return found
