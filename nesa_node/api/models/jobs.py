"""Jobs of a request: their prompts, their events as one stream, and their cancellation.

Work is cancelled when its client disconnects or when it cannot succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from nesa_node.api.generation.job import GenerationEvent, Job
from nesa_node.api.generation.tokenization import encode_blocking, offload_if_large
from nesa_node.api.schemas.chat_template import Render
from nesa_node.api.schemas.generation_request import GrammarCheck
from nesa_node.web.problem import invalid_request

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel
    from nesa_node.core.settings.models import GatewayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What the jobs of a request depend on, beside its body and its model."""

    config: GatewayConfig
    check_grammar: GrammarCheck
    render: Render | None = None
    """Renderer of an untrusted chat template; None: the template is trusted."""
    adapter: str | None = None
    """Published adapter that the request names."""


class ClientDisconnected(Exception):
    """The client has disconnected."""


@asynccontextmanager
async def cancel_when(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the body beside `watches`; if one raises, cancel the body and raise that error.

    A watch that returns has no effect. Leaving the body cancels the watches.
    """
    try:
        async with _run_beside(watches):
            yield
    except BaseExceptionGroup as errors:
        try:
            # The first error is the cause; later ones follow from the cancellation.
            raise errors.exceptions[0] from None
        finally:
            # Breaks the reference cycle of the two errors, which would keep the request alive.
            errors.exceptions[0].__context__ = errors.__traceback__ = None


@asynccontextmanager
async def _run_beside(watches: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch) for watch in watches]
        try:
            yield
        finally:
            # The cancelled task's traceback keeps this frame: leave no references in it.
            while tasks:
                tasks.pop().cancel()
            del group


async def watch_disconnect(receive: Receive) -> None:
    """Raise `ClientDisconnected` once the client, whose body was read, disconnects."""
    while True:
        if (await receive())["type"] == "http.disconnect":
            raise ClientDisconnected


MAX_CONCURRENT_JOBS = 8
"""Limit on jobs of one request that run at once; each has a session of its own."""
_MAX_QUEUED_EVENTS = 64
"""Limit on events of a request that wait to be read."""

JobEvent = tuple[int, GenerationEvent]
RunJobs = Callable[[], AbstractAsyncContextManager[AsyncIterator[JobEvent]]]


@asynccontextmanager
async def run_jobs(
    model: ServedModel, jobs: Sequence[Job], watch_blocks: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[AsyncIterator[JobEvent]]:
    """Events of all `jobs` as they come, each with the index of its job.

    Until the first event, an error of `watch_blocks` cancels the jobs. Leaving the context ends all
    sessions. An error of a job is raised and cancels the remaining jobs.
    """
    begun = asyncio.Event()
    async with (
        _convert_grammar_errors(jobs),
        cancel_when(_run_until(begun, watch_blocks)),
    ):
        if len(jobs) == 1:
            async with model.generate(jobs[0]) as events:
                yield _tag_events(events, begun)
        else:
            queue: asyncio.Queue[JobEvent | None] = asyncio.Queue(_MAX_QUEUED_EVENTS)
            async with cancel_when(_run_all(model, jobs, queue)):
                yield _read_queue(queue, len(jobs), begun)


@asynccontextmanager
async def _convert_grammar_errors(jobs: Sequence[Job]) -> AsyncIterator[None]:
    """Convert errors of grammars that fail only during generation to `HttpProblem`."""
    try:
        yield
    except ValueError as error:
        if jobs[0].grammar is None:
            raise
        raise invalid_request(f"the format cannot be followed: {str(error)[:500]}") from None


async def _tag_events(
    events: AsyncIterator[GenerationEvent], begun: asyncio.Event
) -> AsyncIterator[JobEvent]:
    async for event in events:
        begun.set()
        yield 0, event


async def _read_queue(
    queue: asyncio.Queue[JobEvent | None], jobs: int, begun: asyncio.Event
) -> AsyncIterator[JobEvent]:
    while jobs:
        tagged = await queue.get()
        if tagged is None:
            jobs -= 1
            continue
        begun.set()
        yield tagged


async def _run_all(
    model: ServedModel, jobs: Sequence[Job], queue: asyncio.Queue[JobEvent | None]
) -> None:
    room = asyncio.Semaphore(MAX_CONCURRENT_JOBS)

    async def run(number: int, job: Job) -> None:
        async with room, model.generate(job) as events:
            async for event in events:
                await queue.put((number, event))
        await queue.put(None)

    async with cancel_when(*(run(number, job) for number, job in enumerate(jobs))):
        await asyncio.Event().wait()


async def _run_until(begun: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
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


async def tokenize_prompts(
    model: ServedModel, prompts: Sequence[str | list[int]], param: str
) -> list[tuple[int, ...]]:
    """Tokens of each prompt, at least one. Raises `HttpProblem` as `check_prompt` does.

    The total size decides about a thread: many short prompts take as long as one long prompt.
    """
    return await offload_if_large(
        sum(map(len, prompts)),
        lambda: [_tokenize_prompt(model, prompt, param) for prompt in prompts],
        takes_memory=any(isinstance(prompt, str) for prompt in prompts),
    )


def _tokenize_prompt(model: ServedModel, prompt: str | list[int], param: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        most = model.context_length
        prompt = encode_blocking(
            model.tokenizer, prompt, add_special_tokens=True, max_tokens=most, param=param
        )
        if not prompt and model.tokenizer.bos_token_id is not None:
            prompt = [model.tokenizer.bos_token_id]
    return check_prompt(model, prompt, param)


def check_prompt(model: ServedModel, prompt: Sequence[int], param: str) -> tuple[int, ...]:
    """Raise `HttpProblem` for a prompt without tokens, or with tokens that the model lacks.

    Chat templates may return an empty text, and tokenizers such tokens.
    """
    if not prompt:
        raise invalid_request(f"{param}: it has no tokens", param=param)
    if max(prompt) >= model.vocab_size:
        raise invalid_request(
            f"{param}: the model has no token {max(prompt)}, its last is {model.vocab_size - 1}",
            param=param,
        )
    return tuple(prompt)
