"""A dashboard that tests feed by hand, over HTTP in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from nesa_node.client.model.activity import Activity
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.dashboard.app import Dashboard, make_app
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.web.server import serve_app

T = TypeVar("T")
START_S = 10.0


class Served:
    def __init__(self, dashboard: Dashboard, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.dashboard = dashboard
        self.url = url
        self._loop = loop

    def look(self, records: Sequence[NodeRecord], now: float) -> None:
        """As if the swarm held these at `now`."""
        self._run(lambda: self.dashboard.state.update_records(records, now))
        self.tick(now)

    def train(self, trainings: dict[str, Any]) -> None:
        """As if these trainings ran on this machine."""
        self._run(lambda: self.dashboard.state.update_trainings(trainings))
        self._run(self.dashboard.feed.publish)

    def audit(self, audits: AuditHistory) -> None:
        """As if this user's clients had made these audits; shown with the next look."""
        self._run(lambda: self.dashboard.state.update_audits(audits))

    def tick(self, now: float, activity: Activity | None = None) -> None:
        self._run(lambda: self.dashboard.state.advance_time(now, activity))
        self._run(self.dashboard.feed.publish)

    def _run(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_S)


@contextmanager
def served(port: int = 0) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dashboard")
    thread.start()
    started, stopping = threading.Event(), asyncio.Event()
    found: list[Served] = []

    async def serve() -> None:
        dashboard = Dashboard()
        async with serve_app(make_app(dashboard), HttpAddress("127.0.0.1", port)) as address:
            found.append(Served(dashboard, loop, f"http://{address}"))
            started.set()
            await stopping.wait()
            dashboard.feed.close()

    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        assert started.wait(START_S)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        serving.result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
