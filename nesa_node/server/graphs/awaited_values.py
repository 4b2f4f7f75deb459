"""Values that other nodes send for a request, until the request has come and has used them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.graph_messages import GraphValues, SourceNode
from nesa_node.swarm.protocol.graph_values import decode_values

log = get_logger(__name__)

CLAIM_S = 5.0
"""Longest time from the values to the client's request: both are on their way at once."""
MAX_WAIT_S = 300.0
"""Longest time from a request to its values, which another node may have to compute."""
MAX_HELD_PER_PEER = 256
MAX_DROPPED = 4096


@dataclass(slots=True, eq=False)
class _Delivery:
    """What one node sends for one request."""

    message: GraphValues | None = None
    payload: bytearray = field(default_factory=bytearray)
    is_claimed: asyncio.Event = field(default_factory=asyncio.Event)
    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    is_used: asyncio.Event = field(default_factory=asyncio.Event)


class AwaitedValues:
    """Deliveries by key and sender."""

    def __init__(self) -> None:
        self._deliveries: dict[tuple[bytes, PeerId], _Delivery] = {}
        self._held: Counter[PeerId] = Counter()
        self._dropped: LruTable[tuple[bytes, PeerId], bool] = LruTable(MAX_DROPPED)
        """Deliveries whose requests fail at once when they come."""

    def __len__(self) -> int:
        return len(self._deliveries)

    async def hold(self, sender: PeerId, message: GraphValues, payload: bytearray) -> None:
        """Keep values until their request has used them, or does not come in time.

        Once they are claimed a cancelled call goes on: what it holds is in use. Raises
        `ProtocolError` where the sender's are here already, or too many of its are.
        """
        name = message.key, sender
        delivery = self._deliveries.get(name, _Delivery())
        if delivery.has_come.is_set():
            raise ProtocolError("unexpected", "values of a request came twice")
        if self._held[sender] >= MAX_HELD_PER_PEER:
            self._dropped.put(name, True)
            delivery.has_come.set()  # where a request waits for it, it fails
            raise ProtocolError("too_many", f"values for {MAX_HELD_PER_PEER} requests wait")
        self._deliveries[name] = delivery
        self._held[sender] += 1
        delivery.message, delivery.payload = message, payload
        delivery.has_come.set()
        try:
            async with asyncio.timeout(CLAIM_S):
                await delivery.is_claimed.wait()
            await wait_until_done(asyncio.ensure_future(delivery.is_used.wait()))
        except TimeoutError:
            log.debug("values_not_claimed", peer=sender)
        finally:
            self._held -= Counter([sender])
            if not delivery.is_claimed.is_set():
                self._dropped.put(name, True)
            self._forget(name, delivery)

    @asynccontextmanager
    async def claim(self, sources: Sequence[SourceNode]) -> AsyncIterator[dict[int, Tensor]]:
        """Wait for the values of all sources. They are released at the end of the context.

        Raises `ProtocolError`: "values_missing" if they do not come or came too early, "bad_tensor"
        for other ones, "unexpected" for values that another request has claimed.
        """
        claimed: dict[tuple[bytes, PeerId], _Delivery] = {}
        try:
            for source in sources:
                name = source.key, PeerId(source.peer)
                delivery = self._deliveries.setdefault(name, _Delivery())
                if delivery.is_claimed.is_set():
                    raise ProtocolError("unexpected", "these values are another request's")
                delivery.is_claimed.set()
                claimed[name] = delivery
                if name in self._dropped:
                    delivery.has_come.set()
            values: dict[int, Tensor] = {}
            for source, delivery in zip(sources, claimed.values(), strict=True):
                values |= await _take(source, delivery)
            yield values
        finally:
            for name, delivery in claimed.items():
                delivery.is_used.set()
                self._forget(name, delivery)

    def _forget(self, name: tuple[bytes, PeerId], delivery: _Delivery) -> None:
        delivery.message, delivery.payload = None, bytearray()
        if self._deliveries.get(name) is delivery:
            del self._deliveries[name]


async def _take(source: SourceNode, delivery: _Delivery) -> dict[int, Tensor]:
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await delivery.has_come.wait()
    except TimeoutError:
        raise ProtocolError(
            "values_missing", f"{source.peer} sent no values for {MAX_WAIT_S:.0f} s"
        ) from None
    if delivery.message is None:
        raise ProtocolError("values_missing", f"values of {source.peer} were dropped")
    found = decode_values(delivery.message.values, delivery.payload)
    if found.keys() != set(source.values):
        raise ProtocolError("bad_tensor", f"{source.peer} sent other values")
    return found
