"""Admission control: which peers may open sessions, and how much memory each may reserve."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nesa_node.core.errors import BusyError, CacheFullError, ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool, pages_for

RETRY_AFTER_RANGE_S = (0.2, 5.0)
"""Bounds of the suggested retry delay. Clients treat more than the upper bound as the upper
bound."""
INITIAL_END_GAP_S = 0.5
MIN_RESERVE_PEERS = 4
"""Peers that can always fit into the reserve for hidden states."""
END_GAP_LEARNING_RATE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    hidden_bytes: int
    """Host memory for hidden states: inputs of queued steps, outputs that wait or are kept for
    replay. Data being received is not included."""
    hidden_bytes_per_peer: int
    hidden_bytes_per_token: int
    hidden_reserve_bytes: int = 0
    """Memory beyond `hidden_bytes` for peers that hold at most a quarter of it: identities are
    free, and without a reserve two of one attacker would leave no room."""
    sessions_per_peer: int
    cache_tokens_per_peer: int
    """Tokens through all blocks of the span, in whole pages."""
    streams_per_peer: int = 512
    allow: frozenset[PeerId] = frozenset()
    """If not empty, the only peers that are served."""
    deny: frozenset[PeerId] = frozenset()
    trusted: frozenset[PeerId] = frozenset()
    """Peers that share one prefix cache."""


class SessionGrant:
    """Reservation of one session: pages of the pool and memory for hidden states."""

    def __init__(self, admission: Admission, peer: PeerId) -> None:
        self.reservation = admission.pool.reserve(0)
        self._admission = admission
        self._peer = peer
        self._hidden_bytes = 0

    def grow(self, pages: int, tokens: int) -> None:
        """Reserve more. Raises `CacheFullError` without reserving anything."""
        admission = self._admission
        hidden_bytes = tokens * admission.limits.hidden_bytes_per_token
        admission.check_quota(self._peer, pages, hidden_bytes)
        self.reservation.grow(pages)
        admission.add_usage(self._peer, pages, hidden_bytes)
        self._hidden_bytes += hidden_bytes

    def grow_row(self, have: int, want: int) -> None:
        """Extend a row's reservation from `have` to `want` tokens.

        Raises `ProtocolError("cache_full")` if there is no room.
        """
        try:
            self.grow(pages_for(want) - pages_for(have), want - have)
        except CacheFullError as error:
            raise ProtocolError(
                "cache_full", f"a row would hold {want} tokens, {have} were promised: {error}"
            ) from None

    def close(self) -> None:
        self._admission.add_usage(self._peer, -self.reservation.pages, -self._hidden_bytes)
        self.reservation.close()


class Admission:
    """Accounts reservations, each made whole when a session opens, returned whole when it ends."""

    def __init__(
        self,
        limits: AdmissionLimits,
        pool: PagePool,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self._clock = clock
        self._peer_pages: Counter[PeerId] = Counter()
        self._peer_sessions: Counter[PeerId] = Counter()
        self._peer_streams: Counter[PeerId] = Counter()
        self._peer_hidden_bytes: Counter[PeerId] = Counter()
        self._hidden_bytes = 0
        self._ended_at = clock()
        self._mean_end_gap_s = INITIAL_END_GAP_S

    @property
    def total_tokens(self) -> int:
        return self.pool.num_pages * PAGE_TOKENS

    @property
    def max_tokens(self) -> int:
        """Most tokens that sessions can reserve on an otherwise empty node."""
        limits = self.limits
        return min(self.total_tokens, limits.hidden_bytes // limits.hidden_bytes_per_token)

    @property
    def free_tokens(self) -> int:
        """Tokens that sessions of several peers can still reserve."""
        hidden_bytes = max(self.limits.hidden_bytes - self._hidden_bytes, 0)
        room = hidden_bytes // self.limits.hidden_bytes_per_token
        return min(max(self.pool.unreserved_pages, 0) * PAGE_TOKENS, room)

    @property
    def sessions(self) -> int:
        return self._peer_sessions.total()

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until the next session ends, within `RETRY_AFTER_RANGE_S`."""
        least, most = RETRY_AFTER_RANGE_S
        return min(max(self._mean_end_gap_s, least), most)

    def check_peer(self, peer: PeerId) -> None:
        """Raises `ProtocolError("not_allowed")` for a peer that the operator does not serve."""
        limits = self.limits
        if peer in limits.deny or (limits.allow and peer not in limits.allow):
            raise ProtocolError("not_allowed", f"this node does not serve {peer}")

    @contextmanager
    def admit_stream(self, peer: PeerId) -> Iterator[None]:
        """Hold one of the streams that `peer` may have. Raises `BusyError`."""
        if self._peer_streams[peer] >= self.limits.streams_per_peer:
            raise BusyError("too many streams from this peer", RETRY_AFTER_RANGE_S[1])
        self._peer_streams[peer] += 1
        try:
            yield
        finally:
            _subtract(self._peer_streams, peer, 1)

    @contextmanager
    def admit_session(self, peer: PeerId, *, rows: int, max_tokens: int) -> Iterator[SessionGrant]:
        """Reserve one session of `rows` times `max_tokens` tokens.

        Raises `BusyError` when room may become free later, `ProtocolError("too_large")` when the
        request exceeds what a peer may ever have.
        """
        pages, tokens = rows * pages_for(max_tokens), rows * max_tokens
        most_pages = min(self.pool.num_pages, pages_for(self.limits.cache_tokens_per_peer))
        hidden_bytes = min(self.limits.hidden_bytes, self.limits.hidden_bytes_per_peer)
        room = hidden_bytes // self.limits.hidden_bytes_per_token
        most = min(most_pages * PAGE_TOKENS, room)
        if pages > most_pages or tokens > most:
            raise ProtocolError(
                "too_large",
                f"{rows} x {max_tokens} cache tokens asked for, this node gives a peer at most "
                f"{most}; ask for a shorter session or fewer rows",
            )
        if self._peer_sessions[peer] >= self.limits.sessions_per_peer:
            quota = self.limits.sessions_per_peer
            raise BusyError(f"{peer} has {quota} sessions, which is its quota", self.retry_after_s)
        place = SessionGrant(self, peer)
        try:
            place.grow(pages, tokens)
        except CacheFullError as error:
            raise BusyError(str(error), self.retry_after_s) from None
        self._peer_sessions[peer] += 1
        try:
            yield place
        finally:
            _subtract(self._peer_sessions, peer, 1)
            place.close()
            self._record_end()

    def check_quota(self, peer: PeerId, pages: int, hidden_bytes: int) -> None:
        """Raises `CacheFullError` for more than the peer, or all peers together, may have."""
        if self._peer_pages[peer] + pages > pages_for(self.limits.cache_tokens_per_peer):
            raise CacheFullError(
                f"the quota of {peer} has no room for {pages * PAGE_TOKENS} more tokens"
            )
        kept_bytes = self._peer_hidden_bytes[peer] + hidden_bytes
        if kept_bytes > self.limits.hidden_bytes_per_peer:
            raise CacheFullError(
                f"the quota of {peer} has no room for hidden states of {pages * PAGE_TOKENS} "
                "more tokens"
            )
        reserve_bytes = self.limits.hidden_reserve_bytes
        is_newcomer = kept_bytes <= reserve_bytes // MIN_RESERVE_PEERS
        most_bytes = self.limits.hidden_bytes + (reserve_bytes if is_newcomer else 0)
        if hidden_bytes and self._hidden_bytes + hidden_bytes > most_bytes:
            raise CacheFullError(f"no room for hidden states of {pages * PAGE_TOKENS} tokens")

    def add_usage(self, peer: PeerId, pages: int, hidden_bytes: int) -> None:
        """Add to what a peer holds; negative amounts release."""
        _subtract(self._peer_pages, peer, -pages)
        _subtract(self._peer_hidden_bytes, peer, -hidden_bytes)
        self._hidden_bytes += hidden_bytes

    def _record_end(self) -> None:
        now = self._clock()
        gap_s = min(now - self._ended_at, RETRY_AFTER_RANGE_S[1])
        self._mean_end_gap_s += END_GAP_LEARNING_RATE * (gap_s - self._mean_end_gap_s)
        self._ended_at = now


def _subtract(counts: Counter[PeerId], peer: PeerId, amount: int) -> None:
    counts[peer] -= amount
    if counts[peer] <= 0:
        del counts[peer]
