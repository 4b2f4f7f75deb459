"""Handshake on an incoming stream: its first message, or the refusal of it.

Log of refused streams and messages, rate limited so that refused peers cannot fill the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from nesa_node.core.errors import BusyError, FrameError, ProtocolError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.protocol.messages import AnyMessage, Busy, ErrorMessage
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 10.0


async def receive_first_message(stream: Stream) -> AnyMessage:
    """Receive the first message. Raises `FrameError` if none arrives within
    `FIRST_MESSAGE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            message, _ = await stream.receive()
    except TimeoutError:
        raise FrameError(f"nothing came for {FIRST_MESSAGE_TIMEOUT_S:.0f} s") from None
    return message


async def send_refusal(stream: Stream, error: ProtocolError, *, free_tokens: int = 0) -> None:
    """Send the reason of a refusal; does not raise if the peer does not receive it."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            if isinstance(error, BusyError):
                await stream.send(
                    Busy(
                        retry_after_s=error.retry_after_s,
                        free_tokens=free_tokens,
                        message=str(error)[:1024],
                    )
                )
            else:
                await stream.send(ErrorMessage(code=error.code, message=str(error)[:2048]))
    except (ProtocolError, TimeoutError):
        log.debug("refusal_not_delivered", peer=stream.peer)


REFUSAL_PERIOD_S = 10.0
MAX_LOGGED_REFUSALS = 20
"""Most refusals logged in a period, of all peers together: identities are free."""


REFUSAL_CODES = (
    "bad_frame", "bad_link", "bad_position", "bad_prefix", "bad_rows", "bad_tensor", "busy",
    "cache_full", "context_length", "downstream_lost", "draining", "future_epoch", "idle_timeout",
    "not_a_member", "not_allowed", "not_computed", "not_donor", "not_finite", "not_linked",
    "not_upstream", "session_exists", "stale_epoch", "stale_step", "step_conflict", "too_large",
    "unexpected", "unknown_quality", "unknown_session", "version_mismatch", "wrong_blocks",
    "wrong_model",
)  # fmt: skip
"""All codes of refusals, for metrics."""


class RefusalLog:
    """Logs the first `MAX_LOGGED_REFUSALS` refusals of each period, and how many more there were.

    Counts all by code: refused `streams`, and `messages` refused in sessions that continued.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._clock = clock
        self._period_began_at = clock()
        self._count = 0

    def record(self, *, peer: str, code: str, reason: str) -> None:
        """Record that a stream was refused or a session ended by this node."""
        self.streams[code] += 1
        now = self._clock()
        if now - self._period_began_at >= REFUSAL_PERIOD_S:
            if self._count > MAX_LOGGED_REFUSALS:
                log.warning("refusals_not_logged", count=self._count - MAX_LOGGED_REFUSALS)
            self._period_began_at, self._count = now, 0
        self._count += 1
        if self._count <= MAX_LOGGED_REFUSALS:
            log.info("stream_refused", peer=peer, code=code, reason=reason)
