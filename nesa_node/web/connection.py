"""HTTP connections with timeouts for stalled clients, which uvicorn lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nesa_node.web.attempts import address_group
from nesa_node.web.connections import ConnectionTable

HEADERS_S = 15.0
FIRST_HEADERS_S = 5.0
"""Timeout for headers on a connection without a key."""
STALLED_S = 60.0
READ_BYTES = 1 << 13
"""Maximum bytes that one turn of the event loop reads; as one-byte chunks they take 7 ms to parse.

It also bounds how far headers beyond uvicorn's limit are read.
"""


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 connection that closes if the client stalls.

    Headers of a request may take `HEADERS_S`, or `FIRST_HEADERS_S` before the connection has shown
    a key; otherwise slow clients could hold all connections (Slowloris). A response of which the
    client reads nothing for `STALLED_S` while the write buffer is full is aborted, which frees the
    work behind it. `scope["state"]["connection"]` is this object, so that the application can
    report a shown key (`know`).
    """

    _given_up: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*given, **options)
        self._table = table
        self._read = bytearray(READ_BYTES)

    @property
    def is_waiting(self) -> bool:
        if self.transport.is_closing() or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            # A closed connection stays until the client has read the rest of the response.
            return True
        # A client that pipelines requests and reads no response is waiting, too.
        return self._stalled is not None and not self._table.is_known(self)

    @property
    def has_room(self) -> bool:
        """False if this connection exceeds the limit and its requests must be refused."""
        return self._table.has_room(self)

    def know(self, key: str) -> bool:
        """Assign the connection to a key; False if the key has too many connections."""
        return self._table.know(self, key)

    def drop(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.add(self, address_group(self.client[0]) if self.client else "")
        self._wait_for_headers()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_headers()
        else:
            self._stop_waiting()

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
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._go_on()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        if self.scope is not None:
            self.scope["state"].pop("connection", None)
        self._stop_waiting()
        self._go_on()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _wait_for_headers(self) -> None:
        if self._given_up is None:
            known = self._table.is_known(self)
            wait_s = HEADERS_S if known else min(FIRST_HEADERS_S, HEADERS_S)
            self._given_up = self.loop.call_later(wait_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
