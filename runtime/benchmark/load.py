"""Who sends when: a fixed number of clients that wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from runtime.benchmark.client import Client, Record
from runtime.benchmark.workload import Job

Progress = Callable[[Record], None]


async def closed_loop(client: Client, jobs: Sequence[Job], concurrency: int, progress: Progress) -> list[Record]:
    """Each of `concurrency` clients sends the next job when its last answer is complete. Load follows the server."""
    waiting = iter(jobs)
    records: list[Record] = []

    async def work() -> None:
        for job in waiting:
            records.append(await client.send(job))
            progress(records[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(work())
    return records


async def open_loop(client: Client, jobs: Sequence[Job], arrivals: Sequence[float], progress: Progress) -> list[Record]:
    """Sends each job at its time, however many are under way. Load does not follow the server.

    Latencies count from the time a request was due: a generator that is late itself hides nothing.

    Args:
        arrivals: seconds from now, in order, one per job.
    """
    begin = client.now

    async def send(job: Job, due: float) -> Record:
        await asyncio.sleep(due - client.now)
        record = await client.send(job, due)
        progress(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(job, begin + at)) for job, at in zip(jobs, arrivals, strict=True)]
    return [task.result() for task in tasks]
