"""Networks in pieces that a gateway offers: pictures, transcriptions and embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

from nesa_node.api.models.registry import last_part
from nesa_node.api.processes.workers import FairThreadPool
from nesa_node.client.model.loop_thread import Interrupt, interrupting
from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import HttpProblem, invalid_request
from nesa_node.web.rate_limits import FairSlots

MAX_RUNNING = 16
"""Requests that run at once; one key may use three quarters of these threads."""
MAX_WAITING = 256
RETRY_S = 2.0

T = TypeVar("T")


class Pipeline(Protocol):
    """A `SwarmPipeline`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def close(self) -> None: ...


class NetworkRegistry:
    """Networks by name, each opened for a task with the first request of it. Close it after use."""

    def __init__(
        self, names: Sequence[str], open_pipeline: Callable[[str, str], Pipeline] | None = None
    ) -> None:
        """`open_pipeline` opens a task's pipeline with a network. It blocks, and may raise.

        Raises `ConfigError` for two networks of one name.
        """
        self.created = int(time.time())
        self._sources = {last_part(name): name for name in names}
        if len(self._sources) < len(names):
            raise ConfigError(
                f"--networks: two of {', '.join(names)} have the same name in the API, which is "
                "the last part of theirs"
            )
        self._open = open_pipeline
        self._openings: dict[tuple[str, str], asyncio.Task[Pipeline]] = {}
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}
        self._threads = FairThreadPool(
            MAX_RUNNING, max_per_caller=MAX_RUNNING * 3 // 4, name="nesa-network"
        )
        self._shares = FairSlots(MAX_WAITING, "requests", retry_after_s=RETRY_S)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the API."""
        return tuple(self._sources)

    def find(self, name: str | None) -> str | None:
        """The network of that name, source or last part of a name; None: no such network."""
        if name is None:
            return None
        return next((key for key, source in self._sources.items() if name in (key, source)), None)

    def require(self, name: str | None) -> str:
        """The network of that name, or the only one. Raises `HttpProblem`."""
        found = self.find(name)
        if name is None and len(self._sources) == 1:
            (found,) = self._sources
        if name is None and found is None and self._sources:
            raise invalid_request(
                f"model is required, since several are served: {', '.join(self._sources)}",
                param="model",
                code="missing_required_parameter",
            )
        if found is None:
            offered = ", ".join(self._sources) or "none (start the gateway with --networks MODEL)"
            raise HttpProblem(
                404,
                f"`{(name or '')[:200]}` is no network here; networks in pieces: {offered}",
                code="model_not_found",
                param="model",
            )
        return found

    async def run(
        self, name: str, task: str, work: Callable[[Pipeline], T], *, alone: bool = False
    ) -> T:
        """Run `work` with the pipeline of a task, in a thread; `alone`: one after another.

        A cancelled call ends its work with the request to the network that runs, and waits for
        that. Raises `HttpProblem` where too many requests wait, where the network does not fit the
        task, or where the pipeline refuses what it is given; and the `NesaError`s of requests.
        """
        caller = current_caller()
        self._shares.acquire(caller)
        turn = self._turns.setdefault((name, task), asyncio.Lock()) if alone else nullcontext()
        try:
            pipeline = await self._find_pipeline(name, task)
            async with turn:
                interrupt = Interrupt()
                running = self._threads.submit(caller, partial(_work, work, pipeline, interrupt))
                try:
                    return await asyncio.wrap_future(running)
                except asyncio.CancelledError:
                    interrupt.set()
                    await wait_until_done(asyncio.wrap_future(running))
                    raise
        except (ConfigError, ValueError, TypeError) as error:  # of diffusers and transformers, too
            reason = str(error).strip().partition("\n")[0][:300]
            raise invalid_request(reason) from error
        finally:
            self._shares.release(caller)

    async def _find_pipeline(self, name: str, task: str) -> Pipeline:
        """Open a pipeline once, also where the request that needed it first is cancelled."""
        key = name, task
        opening = self._openings.get(key)
        if opening is None or (opening.done() and _may_try_again(opening)):
            opening = asyncio.create_task(self._open_pipeline(name, task), name="open-network")
            self._openings[key] = opening
        with track_wait("the network to be opened for the first time"):
            return await asyncio.shield(opening)

    async def _open_pipeline(self, name: str, task: str) -> Pipeline:
        assert self._open is not None
        try:
            return await asyncio.to_thread(self._open, task, self._sources[name])
        except UnsupportedModelError as error:
            raise invalid_request(str(error), param="model") from error
        except ConfigError as error:
            raise HttpProblem(500, str(error), code="misconfigured") from error

    async def close(self) -> None:
        """End all requests and leave the swarm."""
        found = await asyncio.gather(*self._openings.values(), return_exceptions=True)
        pipelines = [each for each in found if not isinstance(each, BaseException)]
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in pipelines))
        await asyncio.to_thread(self._threads.shutdown)


def _work(work: Callable[[Pipeline], T], pipeline: Pipeline, interrupt: Interrupt) -> T:
    with interrupting(interrupt):
        return work(pipeline)


def _may_try_again(opening: asyncio.Task[Pipeline]) -> bool:
    """Whether a pipeline was not opened for a reason that may pass."""
    error = opening.exception()
    return error is not None and not (isinstance(error, HttpProblem) and error.status == 400)
