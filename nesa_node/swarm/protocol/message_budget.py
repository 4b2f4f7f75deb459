"""Rate limit of session messages per peer, on all of its streams together.

A node limits its clients and neighbours, a client its hops.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from nesa_node.compression.codecs import RAW
from nesa_node.core.ids import PeerId
from nesa_node.swarm.protocol.messages import (
    Link,
    Message,
    Received,
    Reorder,
    Rollback,
    Sync,
    tensor_of,
)
from nesa_node.swarm.protocol.stream import Stream

MAX_BUDGET_PEERS = 4096

_MESSAGE_PRICE_S = 1 / 1000
"""Price of a message: a client with 64 sessions sends 128 pings a second if all steps are late."""
_TOKEN_PRICE_S = 1 / 10_000
"""Price of a message sent for each token: at 50 tokens/s in each of 64 sessions a client sends
3,200 steps a second and as many `Received`; a hop sends as many outputs."""
_CHANGE_PRICE_S = 1 / 400
"""Price of a change of up to `_ROWS_PER_CHANGE_PRICE` rows' caches, which takes up to a millisecond
in sessions of many pages. More rows take proportionally longer: 14 ms for 256 after 120 steps."""
_ROWS_PER_CHANGE_PRICE = 16
"""Beam search reorders with every token: with up to 16 beams up to 400 times a second."""
_DECODE_PRICE_S_PER_BYTE = 1e-9
"""Price of decoding a compressed tensor: 2 kB can stand for 64 MiB, which take 30 ms."""
_BURST_S = 2.0
"""Total price of the messages that a peer may send in one burst."""


class MessageBudget:
    """Per-peer budget in seconds of processing; delays reading from a peer that exceeds it.

    If the next message is already buffered, reading it would not yield to the event loop, so that
    `wait_until_paid` yields once before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_at: OrderedDict[PeerId, float] = OrderedDict()
        """By peer: the time at which its last message is paid for."""

    async def wait_until_paid(
        self, stream: Stream, message: Message, *, is_refused: bool = False
    ) -> None:
        """Wait until `stream`, which brought `message`, may be read on."""
        wait_s = self.charge(stream.peer, message, is_refused=is_refused)
        if wait_s or stream.unread_bytes:
            await asyncio.sleep(wait_s)

    def charge(self, peer: PeerId, message: Message, *, is_refused: bool = False) -> float:
        """Count a message. Returns the seconds until it is paid for."""
        now = self._clock()
        price_s = _MESSAGE_PRICE_S
        tensor = tensor_of(message)
        if isinstance(message, Link | Reorder | Rollback | Sync):
            rows = message.sources if isinstance(message, Reorder) else message.lengths
            price_s = _CHANGE_PRICE_S * max(math.ceil(len(rows) / _ROWS_PER_CHANGE_PRICE), 1)
        elif not is_refused and (isinstance(message, Received) or tensor is not None):
            price_s = _TOKEN_PRICE_S
        if tensor is not None and tensor.codec != RAW.text:
            price_s += tensor.decoded_nbytes * _DECODE_PRICE_S_PER_BYTE
        paid_at = max(self._paid_at.get(peer, 0.0), now - _BURST_S) + price_s
        self._paid_at[peer] = paid_at
        self._paid_at.move_to_end(peer)
        if len(self._paid_at) > MAX_BUDGET_PEERS:
            self._paid_at.popitem(last=False)
        return max(paid_at - now, 0.0)
