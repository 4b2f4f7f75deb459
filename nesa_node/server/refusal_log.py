"""Log of refused streams and messages, rate limited so that refused peers cannot fill the disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

PERIOD_S = 10.0
MOST = 20
"""Most refusals logged in a period, of all peers together: identities are free."""


CODES = (
    "bad_frame", "bad_link", "bad_position", "bad_prefix", "bad_rows", "bad_tensor", "busy",
    "cache_full", "context_length", "downstream_lost", "draining", "future_epoch", "idle_timeout",
    "not_a_member", "not_allowed", "not_computed", "not_donor", "not_finite", "not_linked",
    "not_upstream", "session_exists", "stale_epoch", "stale_step", "step_conflict", "too_large",
    "unexpected", "unknown_quality", "unknown_session", "version_mismatch", "wrong_blocks",
    "wrong_model",
)  # fmt: skip
"""All codes of refusals, for metrics."""


class RefusalLog:
    """Logs the first `MOST` refusals of each period, and how many more there were.

    Counts all by code: refused `streams`, and `messages` refused in sessions that continued.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._clock = clock
        self._began = clock()
        self._count = 0

    def note(self, *, peer: str, code: str, reason: str) -> None:
        """Record that a stream was refused or a session ended by this node."""
        self.streams[code] += 1
        now = self._clock()
        if now - self._began >= PERIOD_S:
            if self._count > MOST:
                log.warning("refusals_not_logged", count=self._count - MOST)
            self._began, self._count = now, 0
        self._count += 1
        if self._count <= MOST:
            log.info("stream_refused", peer=peer, code=code, reason=reason)
