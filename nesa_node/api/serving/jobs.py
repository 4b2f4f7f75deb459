"""Concurrent jobs of a request, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from nesa_node.api.decoding.job import Event, Job
from nesa_node.api.serving.unless import unless
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

AT_ONCE = 8
"""Limit on jobs of one request that run at once; each has a session of its own."""
_QUEUED = 64
"""Limit on events of a request that wait to be read."""

Tagged = tuple[int, Event]


class Watch(Protocol):
    """Check that a model can be computed: raises `Problem` or `NesaError` once it cannot."""

    def __call__(self, model: ServedModel) -> Coroutine[Any, Any, None]: ...


@asynccontextmanager
async def running(
    model: ServedModel, jobs: Sequence[Job], watch: Watch
) -> AsyncIterator[AsyncIterator[Tagged]]:
    """Events of all `jobs` as they come, each with the index of its job.

    Until the first event, an error of `watch` cancels the jobs. Leaving the context ends all
    sessions. An error of a job is raised and cancels the remaining jobs.
    """
    begun = asyncio.Event()
    async with _grammar_told(jobs), unless(_until(begun, lambda: watch(model))):
        if len(jobs) == 1:
            async with model.generate(jobs[0]) as events:
                yield _tagged(events, begun)
        else:
            queue: asyncio.Queue[Tagged | None] = asyncio.Queue(_QUEUED)
            async with unless(_run_all(model, jobs, queue)):
                yield _queued(queue, len(jobs), begun)


@asynccontextmanager
async def _grammar_told(jobs: Sequence[Job]) -> AsyncIterator[None]:
    """Convert errors of grammars that fail only during generation to `Problem`."""
    try:
        yield
    except ValueError as error:
        if jobs[0].grammar is None:
            raise
        raise Problem(
            400, f"the format cannot be followed: {str(error)[:500]}", code="invalid_value"
        ) from None


async def _tagged(events: AsyncIterator[Event], begun: asyncio.Event) -> AsyncIterator[Tagged]:
    async for event in events:
        begun.set()
        yield 0, event


async def _queued(
    queue: asyncio.Queue[Tagged | None], jobs: int, begun: asyncio.Event
) -> AsyncIterator[Tagged]:
    while jobs:
        tagged = await queue.get()
        if tagged is None:
            jobs -= 1
            continue
        begun.set()
        yield tagged


async def _run_all(
    model: ServedModel, jobs: Sequence[Job], queue: asyncio.Queue[Tagged | None]
) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def run(number: int, job: Job) -> None:
        async with room, model.generate(job) as events:
            async for event in events:
                await queue.put((number, event))
        await queue.put(None)

    async with unless(*(run(number, job) for number, job in enumerate(jobs))):
        await asyncio.Event().wait()


async def _until(begun: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` until it ends or `begun` is set, which cancels it."""
    working = asyncio.ensure_future(work())
    beginning = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait({working, beginning}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, beginning):
            task.cancel()
        await asyncio.gather(working, beginning, return_exceptions=True)
        # Avoids a reference cycle: they hold the raised error, and its traceback this frame.
        del task, working, beginning
