"""Who may open a session, and how much of the node all of them together may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nesa_node.core.errors import BusyError, ProtocolError
from nesa_node.core.ids import PeerId

MAX_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    cache_tokens: int
    """Tokens, each through all blocks of the node's span, that the KV cache may hold."""
    outbox_bytes: int
    """Host memory for the outputs that a chain's nodes keep."""
    sessions_per_peer: int
    cache_tokens_per_peer: int
    streams_per_peer: int = 512
    allow: frozenset[PeerId] = frozenset()
    """If not empty, nobody else is served."""
    deny: frozenset[PeerId] = frozenset()


class Admission:
    """Counts what is promised. A promise is made whole at open and returned whole at the end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._tokens: Counter[PeerId] = Counter()
        self._sessions: Counter[PeerId] = Counter()
        self._streams: Counter[PeerId] = Counter()
        self._outbox_bytes = 0

    @property
    def free_tokens(self) -> int:
        return self.limits.cache_tokens - self._tokens.total()

    @property
    def sessions(self) -> int:
        return self._sessions.total()

    def check_peer(self, peer: PeerId) -> None:
        """Raises `ProtocolError("not_allowed")` for a peer that the operator does not serve."""
        limits = self.limits
        if peer in limits.deny or (limits.allow and peer not in limits.allow):
            raise ProtocolError("not_allowed", f"this node does not serve {peer}")

    @contextmanager
    def stream(self, peer: PeerId) -> Iterator[None]:
        """Hold one of the streams that `peer` may have. Raises `BusyError`."""
        if self._streams[peer] >= self.limits.streams_per_peer:
            raise BusyError("too many streams from this peer", MAX_RETRY_AFTER_S)
        self._streams[peer] += 1
        try:
            yield
        finally:
            _give_back(self._streams, peer, 1)

    @contextmanager
    def session(self, peer: PeerId, *, tokens: int, outbox_bytes: int) -> Iterator[None]:
        """Hold room for one session.

        Raises `BusyError` when the room may come back, `ProtocolError("too_large")` when the
        request could never be met.
        """
        limits = self.limits
        most = min(limits.cache_tokens, limits.cache_tokens_per_peer)
        if tokens > most or outbox_bytes > limits.outbox_bytes:
            raise ProtocolError(
                "too_large",
                f"{tokens} cache tokens asked for, this node gives a peer at most {most}; "
                "ask for a shorter session or fewer rows",
            )
        if self._sessions[peer] >= limits.sessions_per_peer:
            raise BusyError(
                f"{peer} has {limits.sessions_per_peer} sessions, which is its quota", 1.0
            )
        if self._tokens[peer] + tokens > limits.cache_tokens_per_peer:
            raise BusyError(f"the quota of {peer} has no room for {tokens} more tokens", 1.0)
        if tokens > self.free_tokens or self._outbox_bytes + outbox_bytes > limits.outbox_bytes:
            raise BusyError(f"{self.free_tokens} cache tokens are free, {tokens} asked for", 0.5)
        self._sessions[peer] += 1
        self._tokens[peer] += tokens
        self._outbox_bytes += outbox_bytes
        try:
            yield
        finally:
            _give_back(self._sessions, peer, 1)
            _give_back(self._tokens, peer, tokens)
            self._outbox_bytes -= outbox_bytes


def _give_back(counts: Counter[PeerId], peer: PeerId, amount: int) -> None:
    counts[peer] -= amount
    if counts[peer] <= 0:
        del counts[peer]
