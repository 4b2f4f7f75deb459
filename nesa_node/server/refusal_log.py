"""Refusals in the log, without letting whoever is refused fill the disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

PERIOD_S = 10.0
MOST = 20
"""Of all peers together in a period: identities are free."""


class RefusalLog:
    """Notes the first `MOST` refusals of each period, and how many more there were."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._count = 0

    def note(self, *, peer: str, code: str, reason: str) -> None:
        now = self._clock()
        if now - self._began >= PERIOD_S:
            if self._count > MOST:
                log.warning("refusals_not_logged", count=self._count - MOST)
            self._began, self._count = now, 0
        self._count += 1
        if self._count <= MOST:
            log.info("stream_refused", peer=peer, code=code, reason=reason)
