"""Publication of peer failures seen by this node, so that other clients avoid these peers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.notice_board import NoticeBoard
from nesa_node.swarm.notices import MAX_ACCUSED, Failure, FailureKind, Report

log = get_logger(__name__)

TTL_S = 240.0
_INTERVAL_S = Report.bounds.min_interval_s + 0.5
_MAX_MODELS = 16
_MAX_COUNT = 1000


class Reporter:
    """Collects failures and, in `run`, publishes them: at once, then at most every ten seconds.

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        board: NoticeBoard,
        own: PeerId,
        *,
        clock: Callable[[], float],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._board = board
        self._own = own
        self._clock = clock
        self._interval_s = interval_s
        self._failures: OrderedDict[ModelId, OrderedDict[PeerId, Failure]] = OrderedDict()
        self._untold: set[ModelId] = set()
        self._news = asyncio.Event()

    def note(self, model_id: ModelId, peer: PeerId, kind: FailureKind) -> None:
        """Record a failure of `peer`; the `MAX_ACCUSED` peers that failed last are reported."""
        if peer == self._own:
            return
        failures = self._failures.setdefault(model_id, OrderedDict())
        self._failures.move_to_end(model_id)
        before = failures.pop(peer, None)
        count = 1 if before is None or before.kind != kind else min(before.count + 1, _MAX_COUNT)
        failures[peer] = Failure(peer=peer, kind=kind, count=count, at=self._clock())
        if len(failures) > MAX_ACCUSED:
            failures.popitem(last=False)
        if len(self._failures) > _MAX_MODELS:
            self._failures.popitem(last=False)
        self._untold.add(model_id)
        self._news.set()

    async def run(self) -> None:
        """Publish new failures until cancelled; errors of publishing are logged."""
        while True:
            await self._news.wait()
            self._news.clear()
            for model_id in tuple(self._untold):
                self._untold.discard(model_id)
                try:
                    await self._publish(model_id)
                except (NesaError, OSError, ValueError) as error:
                    log.info("failures_not_reported", reason=str(error))
            await asyncio.sleep(self._interval_s)

    async def _publish(self, model_id: ModelId) -> None:
        since = self._clock() - TTL_S
        failures = self._failures.get(model_id, OrderedDict())
        fresh = tuple(failure for failure in failures.values() if failure.at > since)
        if fresh:
            await self._board.publish(Report, model_id, ttl_s=TTL_S, failures=fresh)
            log.debug("failures_reported", model=model_id, peers=len(fresh))
