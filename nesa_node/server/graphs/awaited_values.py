"""Values that other nodes send for a request, until the request has come and has used them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.protocol.graph_messages import SourceNode

log = get_logger(__name__)

CLAIM_S = 5.0
"""Longest time from the values to the client's request: both are on their way at once."""
MAX_WAIT_S = 300.0
"""Longest time from a request to its values, which another node may have to compute."""


@dataclass(slots=True, eq=False)
class _Delivery:
    """What one node sends for one request."""

    values: dict[int, Tensor] = field(default_factory=dict)
    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    is_claimed: asyncio.Event = field(default_factory=asyncio.Event)
    is_used: asyncio.Event = field(default_factory=asyncio.Event)


class AwaitedValues:
    """Deliveries by request and sender."""

    def __init__(self) -> None:
        self._deliveries: dict[tuple[bytes, PeerId], _Delivery] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    async def hold(self, key: bytes, sender: PeerId, values: dict[int, Tensor]) -> None:
        """Keep values until their request has used them, or does not come in time.

        Raises `ProtocolError("unexpected")` where those of this sender are here.
        """
        delivery = self._deliveries.setdefault((key, sender), _Delivery())
        if delivery.has_come.is_set():
            raise ProtocolError("unexpected", "values of a request came twice")
        delivery.values = values
        delivery.has_come.set()
        try:
            async with asyncio.timeout(CLAIM_S):
                await delivery.is_claimed.wait()
            await delivery.is_used.wait()
        except TimeoutError:
            log.debug("values_not_claimed", peer=sender)
        finally:
            self._forget(key, sender, delivery)

    @asynccontextmanager
    async def claim(
        self, key: bytes, sources: Iterable[SourceNode]
    ) -> AsyncIterator[dict[int, Tensor]]:
        """Wait for the values of all sources. They are released at the end of the context.

        Raises `ProtocolError`: "values_missing" if they do not come, "bad_tensor" for other ones.
        """
        claimed = {
            PeerId(source.peer): self._deliveries.setdefault(
                (key, PeerId(source.peer)), _Delivery()
            )
            for source in sources
        }
        try:
            for delivery in claimed.values():
                delivery.is_claimed.set()
            values: dict[int, Tensor] = {}
            for source in sources:
                delivery = claimed[PeerId(source.peer)]
                try:
                    async with asyncio.timeout(MAX_WAIT_S):
                        await delivery.has_come.wait()
                except TimeoutError:
                    raise ProtocolError(
                        "values_missing", f"{source.peer} sent no values for {MAX_WAIT_S:.0f} s"
                    ) from None
                if delivery.values.keys() != set(source.values):
                    raise ProtocolError("bad_tensor", f"{source.peer} sent other values")
                values |= delivery.values
            yield values
        finally:
            for peer, delivery in claimed.items():
                delivery.is_used.set()
                self._forget(key, peer, delivery)

    def _forget(self, key: bytes, sender: PeerId, delivery: _Delivery) -> None:
        delivery.values = {}
        if self._deliveries.get((key, sender)) is delivery:
            del self._deliveries[key, sender]
