"""hivemind's DHT node and protocol, but for what costs too much."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from nesa_node.swarm.hive import DHTID, DHTNode, DHTProtocol, PeerID

MAX_NEWCOMERS = 16
"""That wait for the records of which they should have a copy."""

_BATCH_BYTES = 512 * 1024
_BATCH_KEYS = 64
"""Handed over in one call, for which the newcomer charges. A single key may have more bytes."""

_Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]


class MemberNode(DHTNode):  # type: ignore[misc]  # hivemind has no types
    """Looks for the members nearest to a key beside the key.

    Whoever is asked about a key answers with all that lies there, too: hivemind, which asks up to
    20 members before it stores, would have each node fetch all nodes' records from all of them
    whenever it announces itself. Nothing lies under the neighbouring id, to which the same members
    are nearest.
    """

    @classmethod
    async def create(cls, **options: Any) -> MemberNode:
        """As hivemind's, which makes its own protocol."""
        node: MemberNode = await super().create(**options)
        node.protocol.__class__ = MemberProtocol
        node.protocol.newcomers = Newcomers()
        return node

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *arguments: Any,
        found_callback: _Found | None = None,
        **options: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """As hivemind's."""
        keys = {DHTID(int(key) ^ 1): key for key in queries}
        if found_callback is not None:
            tell = found_callback

            async def found(beside: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
                await tell(keys[beside], nearest, visited)

            options["found_callback"] = found
        nearest = await super().find_nearest_nodes(tuple(keys), *arguments, **options)
        return {keys[beside]: members for beside, members in nearest.items()}


class Newcomers:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0


class MemberProtocol(DHTProtocol):  # type: ignore[misc]
    """Trusts `DhtPeer`, through which all passes, and gives newcomers their records slowly.

    hivemind hands to each node that it meets all records of which that one should have a copy, in
    one message packed in one go. Identities are free: here one newcomer is served at a time, in
    calls of bounded size. Beyond `MAX_NEWCOMERS` that wait, a newcomer gets only what is announced
    later.
    """

    newcomers: Newcomers

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        return True

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """As hivemind's."""
        is_new = node_id is not None and node_id not in self.routing_table
        if not responded or not is_new:
            await super().update_routing_table(node_id, peer_id, responded)
            return
        to_ping = self.routing_table.add_or_update_node(node_id, peer_id)
        if to_ping is not None:
            self.p2p.start(self.call_ping(to_ping[1]))
        if self.newcomers.waiting < MAX_NEWCOMERS:
            self.newcomers.waiting += 1
            self.p2p.start(self._hand_over(node_id, peer_id))

    async def _hand_over(self, node_id: DHTID, peer_id: PeerID) -> None:
        try:
            async with self.newcomers.turn:
                keys: list[DHTID] = []
                num_bytes = 0
                for key in list(self.storage.data):
                    await asyncio.sleep(0)
                    if self._should_give(key, node_id):
                        keys.append(key)
                        num_bytes += self.storage.size_of(key)
                    if num_bytes >= _BATCH_BYTES or len(keys) >= _BATCH_KEYS:
                        if not await self._give(peer_id, keys):
                            return
                        keys, num_bytes = [], 0
                await self._give(peer_id, keys)
        finally:
            self.newcomers.waiting -= 1

    async def _give(self, peer_id: PeerID, keys: list[DHTID]) -> bool:
        """Whether `peer_id` has answered."""
        items = [(key, item) for key in keys if (item := self.storage.get(key)) is not None]
        if not items:
            return True
        values = [item.value for _, item in items]
        expirations = [item.expiration_time for _, item in items]
        given = await self.call_store(peer_id, [key for key, _ in items], values, expirations)
        return given is not None

    def _should_give(self, key: DHTID, node_id: DHTID) -> bool:
        """Whether the new node is among the nearest to `key`, and this one the nearest before."""
        nearest = self.routing_table.get_nearest_neighbors(
            key, self.num_replicas + 1, exclude=self.node_id
        )
        others = [each for each, _ in nearest if each != node_id][: self.num_replicas]
        if not others:
            return True
        distances = [each.xor_distance(key) for each in others]
        return bool(
            node_id.xor_distance(key) < distances[-1]
            and self.node_id.xor_distance(key) < distances[0]
        )
