"""HTTP connections with limits of number and time, which uvicorn lacks."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nesa_node.web.rate_limits import address_group

MAX_KEY_FRACTION = 0.75
"""Maximum fraction of a server's connections that one key may have."""
_CONNECTIONS_PER_EXTRA_DROP = 32
"""An owner's number of connections per additional one that is dropped at once."""


class ServedConnection(Protocol):
    """Interface of a connection in the table."""

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the client to send a request or to read a response."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionTable:
    """At most `max_connections`; one more drops a connection that waits for its client.

    Connections without a key are dropped first, then idle ones with a key; among them the oldest of
    the address or key with the most connections. So idle connections block no request, and an
    address with many loses one before an address with few. Connections with a response in progress
    stay, unless a client without a key does not read it.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # The owner is the client's address, or the key that was shown. The oldest come first.
        self._owners: dict[ServedConnection, str] = {}
        self._with_key: set[ServedConnection] = set()
        self._surplus: set[ServedConnection] = set()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, peer: ServedConnection, address: str) -> None:
        """Add a new connection from `address`; a waiting one may be dropped for it."""
        self._set_owner(peer, f"address {address}")
        if not self._make_room(peer):
            self._surplus.add(peer)

    def remove(self, peer: ServedConnection) -> None:
        """Remove a closed connection. May be called twice."""
        owner = self._owners.pop(peer, None)
        if owner is not None:
            self._adjust_count(owner, -1)
        self._with_key.discard(peer)
        self._surplus.discard(peer)

    def has_room(self, peer: ServedConnection) -> bool:
        """Whether a request of this connection may be answered."""
        if peer in self._surplus and self._make_room(peer):
            self._surplus.discard(peer)
        return peer not in self._surplus

    def assign_key(self, peer: ServedConnection, key: str) -> bool:
        """Assign `peer` to a key; False if the key already has too many connections."""
        owner = f"key {key}"
        if peer not in self._owners or self._owners[peer] == owner:
            return True
        if self._counts[owner] >= self._max_connections * MAX_KEY_FRACTION:
            return False
        self._adjust_count(self._owners[peer], -1)
        self._set_owner(peer, owner)
        self._with_key.add(peer)
        return True

    def has_key(self, peer: ServedConnection) -> bool:
        return peer in self._with_key

    def _set_owner(self, peer: ServedConnection, owner: str) -> None:
        self._owners[peer] = owner
        self._adjust_count(owner, 1)

    def _adjust_count(self, owner: str, change: int) -> None:
        self._counts[owner] += change
        if not self._counts[owner]:
            del self._counts[owner]

    def _make_room(self, newcomer: ServedConnection) -> bool:
        if len(self) > self._max_connections:
            for victim in self._droppable(newcomer):
                self.remove(victim)
                victim.drop()
        return len(self) <= self._max_connections

    def _droppable(self, newcomer: ServedConnection) -> list[ServedConnection]:
        """Waiting connections to drop; several of a large owner, since the search takes 1 ms."""
        waiting = [peer for peer in self._owners if peer is not newcomer and peer.is_waiting]
        candidates = [peer for peer in waiting if peer not in self._with_key] or waiting
        owners = {self._owners[peer]: None for peer in candidates}
        most = max(owners, key=self._counts.__getitem__, default="")
        several = 1 + self._counts[most] // _CONNECTIONS_PER_EXTRA_DROP
        return [peer for peer in candidates if self._owners[peer] == most][:several]


HEADERS_TIMEOUT_S = 15.0
KEYLESS_HEADERS_TIMEOUT_S = 5.0
"""Timeout for headers on a connection without a key."""
STALLED_WRITE_TIMEOUT_S = 60.0
READ_BUFFER_BYTES = 1 << 13
"""Maximum bytes that one turn of the event loop reads; as one-byte chunks they take 7 ms to parse.

It also bounds how far headers beyond uvicorn's limit are read.
"""


class HttpConnection(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 connection that closes if the client stalls.

    Headers of a request may take `HEADERS_TIMEOUT_S`, or `KEYLESS_HEADERS_TIMEOUT_S` before the
    connection has shown a key; otherwise slow clients could hold all connections (Slowloris). A
    response of which the client reads nothing for `STALLED_WRITE_TIMEOUT_S` while the write buffer
    is full is aborted, which frees the work behind it. `scope["state"]["connection"]` is this
    object, so that the application can report a shown key (`know`).
    """

    _headers_timer: asyncio.TimerHandle | None = None
    _stalled_write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*given, **options)
        self._table = table
        self._read_buffer = bytearray(READ_BUFFER_BYTES)

    @property
    def is_waiting(self) -> bool:
        if self.transport.is_closing() or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            # A closed connection stays until the client has read the rest of the response.
            return True
        # A client that pipelines requests and reads no response is waiting, too.
        return self._stalled_write_timer is not None and not self._table.has_key(self)

    @property
    def has_room(self) -> bool:
        """False if this connection exceeds the limit and its requests must be refused."""
        return self._table.has_room(self)

    def know(self, key: str) -> bool:
        """Assign the connection to a key; False if the key has too many connections."""
        return self._table.assign_key(self, key)

    def drop(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.add(self, address_group(self.client[0]) if self.client else "")
        self._start_headers_timer()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._start_headers_timer()
        else:
            self._cancel_headers_timer()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            # The task that runs the application starts after this.
            self.scope["state"]["connection"] = self

    def send_400_response(self, msg: str) -> None:
        answer: RequestResponseCycle | None = self.cycle
        if answer is not None and not answer.response_complete:
            # The rest of that response can no longer be sent.
            answer.disconnected = True
            answer.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # Another response has begun, or this one is to HEAD and may have no body.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_write_timer = self.loop.call_later(
            STALLED_WRITE_TIMEOUT_S, self.transport.abort
        )

    def resume_writing(self) -> None:
        self._cancel_stalled_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        if self.scope is not None:
            self.scope["state"].pop("connection", None)
        self._cancel_headers_timer()
        self._cancel_stalled_write_timer()
        super().connection_lost(exc)

    def _cancel_stalled_write_timer(self) -> None:
        if self._stalled_write_timer is not None:
            self._stalled_write_timer.cancel()
            self._stalled_write_timer = None

    def _start_headers_timer(self) -> None:
        if self._headers_timer is None:
            wait_s = HEADERS_TIMEOUT_S
            if not self._table.has_key(self):
                wait_s = min(KEYLESS_HEADERS_TIMEOUT_S, wait_s)
            self._headers_timer = self.loop.call_later(wait_s, self._close_without_headers)

    def _cancel_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _close_without_headers(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
