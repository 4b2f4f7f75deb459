"""A connection that ends where the other side stands still: uvicorn alone waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nesa_node.web.attempts import address_group
from nesa_node.web.connections import ConnectionTable

HEADERS_S = 15.0
FIRST_HEADERS_S = 5.0
"""Until a connection has shown a key."""
STALLED_S = 60.0
READ_BYTES = 1 << 13
"""What is read of one connection in a turn of the event loop. As chunks of one byte it takes 7 ms.

So headers that are longer than uvicorn may hold are not read whole, either.
"""


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """Closed where the headers of a request take longer than `HEADERS_S`, or nobody reads.

    Before it has shown a key they may take `FIRST_HEADERS_S`. `scope["state"]` names it, so that
    the application can say that a key was shown (`know`).

    Else as many connections as there may be, each sending a byte now and then, would keep
    everybody else out; and whoever stops reading would keep what works for it. An answer of which
    nothing is taken for `STALLED_S`, though more waits than fits between us, is for nobody.
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
            # One that is closed stays until the client has read what was left.
            return True
        # Requests sent one after another keep it busy for as long as no answer is read.
        return self._stalled is not None and not self._table.is_known(self)

    @property
    def has_room(self) -> bool:
        """False for one connection too many: its request is to be refused."""
        return self._table.has_room(self)

    def know(self, key: str) -> bool:
        """A key was shown here; False if connections with this key are too many."""
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
            # The task that answers starts later than this.
            self.scope["state"]["connection"] = self

    def send_400_response(self, msg: str) -> None:
        answer: RequestResponseCycle | None = self.cycle
        if answer is not None and not answer.response_complete:
            # The rest of it could not be sent after this one.
            answer.disconnected = True
            answer.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # Another answer has begun, or this is one to HEAD, which may have no body.
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
