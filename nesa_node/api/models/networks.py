"""Networks in pieces that a gateway offers: pictures, transcriptions and embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from nesa_node.api.models.registry import last_part
from nesa_node.api.processes.workers import FairThreadPool
from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.wait_tracking import track_wait
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
        """`open_pipeline` opens a task's pipeline with a network. It blocks, and may raise."""
        self.created = int(time.time())
        self._sources = {last_part(name): name for name in names}
        self._open = open_pipeline
        self._pipelines: dict[tuple[str, str], Pipeline] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
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
        if found is None:
            offered = ", ".join(self._sources) or "none (start the gateway with --networks MODEL)"
            shown = "model is required" if name is None else f"`{name[:200]}` is no network here"
            raise HttpProblem(
                404,
                f"{shown}; networks in pieces: {offered}",
                code="model_not_found",
                param="model",
            )
        return found

    async def run(self, name: str, task: str, work: Callable[[Pipeline], T]) -> T:
        """Run `work` with the pipeline of a task, in a thread.

        Raises `HttpProblem` where too many requests wait, where the network does not fit the task,
        or where the pipeline refuses what it is given; and the `NesaError`s of requests.
        """
        caller = current_caller()
        self._shares.acquire(caller)
        try:
            pipeline = await self._find_pipeline(name, task)
            running = self._threads.submit(caller, partial(work, pipeline))
            return await asyncio.wrap_future(running)
        except (ConfigError, ValueError, TypeError) as error:  # of diffusers and transformers, too
            reason = str(error).strip().partition("\n")[0][:300]
            raise invalid_request(reason) from error
        finally:
            self._shares.release(caller)

    async def _find_pipeline(self, name: str, task: str) -> Pipeline:
        key = name, task
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._pipelines:
                assert self._open is not None
                opening = partial(self._open, task, self._sources[name])
                with track_wait("the network to be opened for the first time"):
                    try:
                        self._pipelines[key] = await asyncio.to_thread(opening)
                    except UnsupportedModelError as error:
                        raise invalid_request(str(error), param="model") from error
            return self._pipelines[key]

    async def close(self) -> None:
        """End all requests and leave the swarm."""
        pipelines = list(self._pipelines.values())
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in pipelines))
        await asyncio.to_thread(self._threads.shutdown)
