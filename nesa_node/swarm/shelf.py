"""Sealed statements on the DHT, by the names of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht_peer import DhtPeer
from nesa_node.swarm.hive import DHTNode
from nesa_node.swarm.private import Membership

log = get_logger(__name__)

FETCH_TIMEOUT_S = 10.0
PUBLISH_TIMEOUT_S = 15.0


class Shelf:
    def __init__(self, node: DHTNode, peer: DhtPeer, membership: Membership) -> None:
        self._node = node
        self._peer = peer
        self._membership = membership

    async def put(
        self, keys: Sequence[str], sealed: bytes, expires_at: float, subkey: str
    ) -> str | None:
        """Store `sealed` under all of `keys`. None, or in a word why not all have taken it."""
        keys = [self._membership.dht_key(key) for key in keys]
        count = len(keys)
        try:
            storing = self._node.store_many(
                keys, [sealed] * count, expires_at, subkeys=[subkey] * count
            )
            stored = await self._peer.run(storing, PUBLISH_TIMEOUT_S)
        except TimeoutError:
            return "timeout"
        return None if all(stored.values()) else "refused"

    async def find(self, key: str, *, members: int | None = None) -> Iterable[bytes]:
        """What lies under `key` and the validator has let pass; nothing if nobody answers.

        The newest of what all members hold who keep it or, with `members`, what the first of so
        many has that are asked at once: of one, a tenth of the traffic, and perhaps not everything.
        """
        try:
            searching = self._node.get(
                self._membership.dht_key(key), latest=members is None, num_workers=members
            )
            found = await self._peer.run(searching, FETCH_TIMEOUT_S)
        except TimeoutError:
            log.warning("directory_timed_out", timeout_s=FETCH_TIMEOUT_S)
            return ()
        if found is None or not isinstance(found.value, dict):
            return ()
        return [item.value for item in found.value.values() if isinstance(item.value, bytes)]
