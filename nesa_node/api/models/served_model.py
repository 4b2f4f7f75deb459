"""Model of the swarm that concurrent requests share, for use on an event loop.

D hidden.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nesa_node.api.generation.decode_loop import Generation, Vocabulary
from nesa_node.api.generation.embedding import embed
from nesa_node.api.generation.job import GenerationEvent, Job, SamplingParams
from nesa_node.api.models.metrics import GatewayMetrics, RequestMetrics
from nesa_node.api.processes.workers import FairThreadPool
from nesa_node.api.schemas.generation_request import read_default_sampling
from nesa_node.client.model.activity import ActivityTracker
from nesa_node.client.model.auto import open_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.loop_thread import Interrupt
from nesa_node.client.model.reruns import run_until_right
from nesa_node.client.session.telemetry import SessionMetrics, session_samples
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample
from nesa_node.core.settings.choices import SamplingDefaults
from nesa_node.core.settings.models import ClientConfig
from nesa_node.core.settings.noise_spec import NoiseSpec
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.web.authenticator import current_caller
from nesa_node.web.rate_limits import FairSlots

log = get_logger(__name__)

T = TypeVar("T")


class ThreadChannel(AsyncIterator[T], Generic[T]):
    """Unbounded channel: a thread puts items without blocking, a coroutine iterates over them.

    Created within the reader's event loop, which is woken once for all items that are put before
    the reader runs. Unread items are kept, so the sender must bound their number.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._wakeup_scheduled = False
        self._reader: asyncio.Future[None] | None = None
        self._has_ended = False
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, items: Iterable[T]) -> None:
        """Add items; called by the thread."""
        self._items.extend(items)
        self._schedule_wakeup()

    def end(self, error: BaseException | None = None) -> None:
        """End the iteration, with `error` if given; called by the thread."""
        self._error = error
        self._has_ended = True
        if self._is_closed:
            self._error = None
        self._schedule_wakeup()

    def close(self) -> None:
        """Stop reading; called within the event loop.

        Drops the error: its traceback refers to the sender's frames, and those refer to this.
        """
        self._is_closed = True
        self._error = None

    async def __anext__(self) -> T:
        while not self._items:
            if self._has_ended and not self._items:
                raise self._take_end()
            self._reader = self._loop.create_future()
            await self._reader
        return self._items.popleft()

    def _take_end(self) -> BaseException:
        # The raising frame must not keep the error in a variable: the error's traceback refers to
        # that frame, which would be a reference cycle.
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None else error

    def _schedule_wakeup(self) -> None:
        if not self._wakeup_scheduled:
            self._wakeup_scheduled = True
            # The event loop may have been closed before the thread ended.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake_reader)

    def _wake_reader(self) -> None:
        self._wakeup_scheduled = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


MAX_THREADS = 256
"""Limit on concurrent requests, each with a thread; one key may use three quarters of them."""
MAX_REQUESTS = 1024
"""Limit on requests, including those that wait for a thread, plus a quarter for keys with few."""
REQUEST_RETRY_S = 1.0


class ServedModel:
    """Runs jobs and embeds texts; each request has a session of its own. Close it after use."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        model_id: ModelId,
        activity: ActivityTracker | None = None,
        metrics: GatewayMetrics | None = None,
        threads: int = MAX_THREADS,
        defaults: SamplingParams | None = None,
        is_private: bool = False,
    ) -> None:
        """Take ownership of `model`. `activity` and `metrics` record requests.

        `is_private`: its nodes multiply encrypted vectors; what was decrypted, numbers with their
        errors, must not be given to clients. `defaults` are the sampling parameters of requests
        that set none; None: OpenAI's.
        """
        self.name = name
        self.model_id = model_id
        self.is_private = is_private
        self.created = int(time.time())
        self.context_length = model.context_length
        self.num_blocks = model.num_blocks
        self.hidden_size = model.ends.hidden_size
        self.vocab_size = model.ends.embedder.vocab_size
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingParams()
        self.activity = ActivityTracker() if activity is None else activity
        self.vocabulary = Vocabulary(tokenizer, model.generation_config, vocab_size=self.vocab_size)
        self._metrics = GatewayMetrics() if metrics is None else metrics
        self._metrics.add_model(model_id)
        self._model = model
        most_of_one = max(1, threads * 3 // 4)
        self._threads = FairThreadPool(threads, max_per_caller=most_of_one, name="nesa-request")
        self._shares = FairSlots(MAX_REQUESTS, "requests", retry_after_s=REQUEST_RETRY_S)
        self._interrupts: set[Interrupt] = set()
        self._closed = False

    @property
    def running(self) -> int:
        """Number of requests that run or wait for a thread."""
        return len(self._interrupts)

    async def join(self) -> None:
        """Join the swarm now, not with the first request. Raises the `SwarmError`s of joining."""
        await asyncio.to_thread(self._model.join)

    @asynccontextmanager
    async def generate(self, job: Job) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        """Context that yields the events of `job`: `PrefillDone`, then deltas of each choice.

        Entering does not wait. Leaving it, for any reason, interrupts the session at once, and does
        not wait either. The iterator raises the `NesaError`s of sessions (`ContextLengthError`,
        `MissingBlocksError`, `BusyError`, ...), `ValueError` for a grammar that cannot be followed,
        and `HttpProblem` if too many grammars are in use. Entering raises `HttpProblem` if too many
        requests wait.
        """
        events, interrupt = ThreadChannel[GenerationEvent](), Interrupt()
        queued = ExitStack()

        def work() -> None:
            queued.close()
            try:
                with self.activity.track_session(
                    self.model_id, prompt_tokens=len(job.prompt)
                ) as running:
                    Generation(
                        self._model,
                        self.vocabulary,
                        job,
                        running=running,
                        interrupt=interrupt,
                        emit=events.put,
                    ).run()
            except CancelledError:
                # A caller that still reads must get an error, not the end of the events.
                events.end(SwarmError(f"{self.name} was closed while this ran; ask again"))
            except BaseException as error:
                events.end(error)
            else:
                events.end()

        self._require_open()
        with self._metrics.track_request(self.model_id, len(job.prompt), job.n) as watched, queued:
            queued.enter_context(track_wait("other requests of this gateway to end first"))
            task = self._submit(work, interrupt)
            try:
                yield _RecordedEvents(events, watched)
            finally:
                interrupt.set()
                task.cancel()
                events.close()

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Embedding of each prompt: [D], float32, of length 1. Cancelling it ends its session.

        Raises as `embedding.embed` does, and `HttpProblem` if too many requests wait.
        """
        interrupt = Interrupt()

        def work() -> list[Tensor]:
            tokens = sum(map(len, prompts))
            with self.activity.track_session(self.model_id, prompt_tokens=tokens) as running:
                found = run_until_right(
                    lambda: embed(self._model, prompts, running=running, interrupt=interrupt)
                )
            return [vector_D.clone() for vector_D in found]

        task = self._submit(work, interrupt)
        try:
            vectors = await asyncio.wrap_future(task)
        finally:
            interrupt.set()
        if not self._closed:
            self._metrics.count_embedding(self.model_id, sum(map(len, prompts)))
        return vectors

    def samples(self) -> Iterator[MetricSample]:
        """Samples of its sessions for Prometheus: a `MetricSource`."""
        yield from session_samples(self.model_id, SessionMetrics())
        yield from self._model.samples()

    async def close(self) -> None:
        """End all requests, leave the swarm, and drop the metrics. May be called twice."""
        self._closed = True
        self._metrics.remove_model(self.model_id)
        for interrupt in list(self._interrupts):
            interrupt.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        self._model.close()

    def _submit(self, work: Callable[[], T], interrupt: Interrupt) -> Future[T]:
        """Queue `work` for a thread. Raises as `FairSlots` does, and `SwarmError` if closed."""
        self._require_open()
        caller = current_caller()
        self._shares.acquire(caller)
        try:
            # The context carries the request's log fields and trace span into the thread.
            task = self._threads.submit(caller, partial(copy_context().run, work))
        except BaseException:
            self._shares.release(caller)
            raise
        self._interrupts.add(interrupt)
        task.add_done_callback(lambda _: self._end_request(caller, interrupt))
        return task

    def _require_open(self) -> None:
        """Raise `SwarmError` if the gateway has closed this model in favour of another one."""
        if self._closed:
            raise SwarmError(f"{self.name} was closed; ask again")

    def _end_request(self, caller: str, interrupt: Interrupt) -> None:
        self._interrupts.discard(interrupt)
        self._shares.release(caller)


class _RecordedEvents(AsyncIterator[GenerationEvent]):
    """Iterator of `events` that records them in `watched`."""

    def __init__(self, events: AsyncIterator[GenerationEvent], watched: RequestMetrics) -> None:
        self._events = events
        self._watched = watched

    async def __anext__(self) -> GenerationEvent:
        event = await anext(self._events)
        self._watched.record_event(event)
        return event


def open_served_model(
    config: ClientConfig,
    checkpoint: Checkpoint,
    *,
    activity: ActivityTracker | None = None,
    metrics: GatewayMetrics | None = None,
    advice: SamplingDefaults = "model",
    discovered: bool = False,
) -> ServedModel:
    """Load tokenizer, embedding and head of `checkpoint`. Blocks.

    The swarm is joined with the first request. `advice`: requests get default sampling parameters
    of the model or OpenAI's. `discovered`: the model's files are untrusted. Raises the errors of
    downloads, and `ConfigError`.
    """
    model, tokenizer = open_model(config, checkpoint, discovered=discovered)
    try:
        served = ServedModel(
            model,
            tokenizer,
            name=checkpoint.name,
            model_id=compute_model_id(checkpoint),
            activity=activity,
            metrics=metrics,
            defaults=read_default_sampling(model.generation_config) if advice == "model" else None,
            is_private=config.private != "none" and NoiseSpec.parse(config.private) is None,
        )
    except BaseException:
        model.close()
        raise
    try:
        served.vocabulary.grammars.prepare()
    except ValueError as error:
        log.info("grammars_unsupported", model=served.name, reason=str(error))
    return served
