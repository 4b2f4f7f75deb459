"""Model of the swarm that concurrent requests share, for use on an event loop.

D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nesa_node.api.bodies.defaults import advised
from nesa_node.api.decoding.embedding import embed
from nesa_node.api.decoding.generation import Generation
from nesa_node.api.decoding.job import Event, Job, Sampling
from nesa_node.api.decoding.vocabulary import Vocabulary
from nesa_node.api.processes.fair_threads import FairThreads
from nesa_node.api.serving.delivery import Delivery
from nesa_node.api.serving.metrics import GatewayMetrics, Watched
from nesa_node.client.activity import ActivityBook
from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.interrupt import Interrupt
from nesa_node.client.opening import open_model
from nesa_node.client.tallies import SessionTallies, session_samples
from nesa_node.core.choices import SamplingAdvice
from nesa_node.core.config import ClientConfig
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import Sample
from nesa_node.core.waiting import waiting
from nesa_node.engine.checkpoint import Checkpoint
from nesa_node.engine.model_id import model_id
from nesa_node.web.doorman import current_caller
from nesa_node.web.shares import Shares

log = get_logger(__name__)

T = TypeVar("T")

THREADS = 256
"""Limit on concurrent requests, each with a thread; one key may use three quarters of them."""
MOST_REQUESTS = 1024
"""Limit on requests, including those that wait for a thread, plus a quarter for keys with few."""
RETRY_AFTER_S = 1.0


class ServedModel:
    """Runs jobs and embeds texts; each request has a session of its own. Close it after use."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        model_id: ModelId,
        activity: ActivityBook | None = None,
        metrics: GatewayMetrics | None = None,
        threads: int = THREADS,
        defaults: Sampling | None = None,
    ) -> None:
        """Take ownership of `model`. `activity` and `metrics` record requests.

        `defaults` are the sampling parameters of requests that set none; None: OpenAI's.
        """
        self.name = name
        self.model_id = model_id
        self.created = int(time.time())
        self.context_length = model.context_length
        self.num_blocks = model.num_blocks
        self.hidden_size = model.ends.hidden_size
        self.vocab_size = model.ends.embedder.vocab_size
        self.tokenizer = tokenizer
        self.defaults = defaults or Sampling()
        self.activity = ActivityBook() if activity is None else activity
        self.vocabulary = Vocabulary(tokenizer, model.generation_config, vocab_size=self.vocab_size)
        self._metrics = GatewayMetrics() if metrics is None else metrics
        self._metrics.serves(model_id)
        self._model = model
        most_of_one = max(1, threads * 3 // 4)
        self._threads = FairThreads(threads, most_of_one=most_of_one, name="nesa-request")
        self._shares = Shares(MOST_REQUESTS, "requests", retry_after_s=RETRY_AFTER_S)
        self._interrupts: set[Interrupt] = set()
        self._closed = False

    @property
    def running(self) -> int:
        """Number of requests that run or wait for a thread."""
        return len(self._interrupts)

    async def join(self) -> None:
        """Join the swarm now, not with the first request. Raises the `SwarmError`s of joining."""
        await asyncio.to_thread(self._model.join)

    def generate(self, job: Job) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Context that yields the events of `job`: `PromptRead`, then deltas of each choice.

        Entering does not wait. Leaving it, for any reason, interrupts the session at once, and does
        not wait either. The iterator raises the `NesaError`s of sessions (`ContextLengthError`,
        `MissingBlocksError`, `BusyError`, ...), `ValueError` for a grammar that cannot be followed,
        and `Problem` if too many grammars are in use. Entering raises `Problem` if too many
        requests wait.
        """
        return self._generate(job)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Embedding of each prompt: [D], float32, of length 1. Cancelling it ends its session.

        Raises as `embedding.embed` does, and `Problem` if too many requests wait.
        """
        interrupt = Interrupt()

        def work() -> list[Tensor]:
            tokens = sum(map(len, prompts))
            with self.activity.running(self.model_id, prompt_tokens=tokens) as running:
                found = embed(self._model, prompts, running=running, interrupt=interrupt)
            return [vector_D.clone() for vector_D in found]

        task = self._submit(work, interrupt)
        try:
            vectors = await asyncio.wrap_future(task)
        finally:
            interrupt.set()
        if not self._closed:
            self._metrics.embedded(self.model_id, sum(map(len, prompts)))
        return vectors

    def samples(self) -> Iterator[Sample]:
        """Samples of its sessions for Prometheus: a `Source`."""
        yield from session_samples(self.model_id, SessionTallies())
        yield from self._model.samples()

    async def close(self) -> None:
        """End all requests, leave the swarm, and drop the metrics. May be called twice."""
        self._closed = True
        self._metrics.forget(self.model_id)
        for interrupt in list(self._interrupts):
            interrupt.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        self._model.close()

    @asynccontextmanager
    async def _generate(self, job: Job) -> AsyncIterator[AsyncIterator[Event]]:
        events, interrupt = Delivery[Event](), Interrupt()
        queued = ExitStack()

        def work() -> None:
            queued.close()
            try:
                self._run(job, events, interrupt)
            except CancelledError:
                # A caller that still reads must get an error, not the end of the events.
                events.end(SwarmError(f"{self.name} was closed while this ran; ask again"))
            except BaseException as error:
                events.end(error)
            else:
                events.end()

        self._require_open()
        with self._metrics.request(self.model_id, len(job.prompt), job.n) as watched, queued:
            queued.enter_context(waiting("other requests of this gateway to end first"))
            task = self._submit(work, interrupt)
            try:
                yield _Watching(events, watched)
            finally:
                interrupt.set()
                task.cancel()
                events.close()

    def _run(self, job: Job, events: Delivery[Event], interrupt: Interrupt) -> None:
        with self.activity.running(self.model_id, prompt_tokens=len(job.prompt)) as running:
            generation = Generation(
                self._model,
                self.vocabulary,
                job,
                running=running,
                interrupt=interrupt,
                emit=events.put,
            )
            generation.run()

    def _submit(self, work: Callable[[], T], interrupt: Interrupt) -> Future[T]:
        """Queue `work` for a thread. Raises `Problem` as `Shares` does, `SwarmError` if closed."""
        self._require_open()
        caller = current_caller()
        self._shares.take(caller)
        try:
            # The context carries the request's log fields and trace span into the thread.
            task = self._threads.submit(caller, partial(copy_context().run, work))
        except BaseException:
            self._shares.give_back(caller)
            raise
        self._interrupts.add(interrupt)
        task.add_done_callback(lambda _: self._end(caller, interrupt))
        return task

    def _require_open(self) -> None:
        """Raise `SwarmError` if the gateway has closed this model in favour of another one."""
        if self._closed:
            raise SwarmError(f"{self.name} was closed; ask again")

    def _end(self, caller: str, interrupt: Interrupt) -> None:
        self._interrupts.discard(interrupt)
        self._shares.give_back(caller)


class _Watching(AsyncIterator[Event]):
    """Iterator of `events` that records them in `watched`."""

    def __init__(self, events: AsyncIterator[Event], watched: Watched) -> None:
        self._events = events
        self._watched = watched

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self._watched.saw(event)
        return event


def open_served_model(
    config: ClientConfig,
    checkpoint: Checkpoint,
    *,
    activity: ActivityBook | None = None,
    metrics: GatewayMetrics | None = None,
    advice: SamplingAdvice = "model",
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
            model_id=model_id(checkpoint),
            activity=activity,
            metrics=metrics,
            defaults=advised(model.generation_config) if advice == "model" else None,
        )
    except BaseException:
        model.close()
        raise
    try:
        served.vocabulary.grammars.prepare()
    except ValueError as error:
        log.info("grammars_unsupported", model=served.name, reason=str(error))
    return served
