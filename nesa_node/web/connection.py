"""A connection that ends where the other side stands still: uvicorn alone waits for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 15.0
STALLED_S = 60.0


class Connection(H11Protocol):
    """Closed where the headers of a request take longer than `HEADERS_S`, or nobody reads.

    Else as many connections as there may be, each sending a byte now and then, would keep
    everybody else out; and whoever stops reading would keep what works for it. An answer of which
    nothing is taken for `STALLED_S`, though more waits than fits between us, is for nobody.
    """

    _given_up: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._go_on()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._go_on()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _wait_for_headers(self) -> None:
        if self._given_up is None:
            self._given_up = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
