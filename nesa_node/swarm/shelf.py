"""Sealed statements on the DHT, by the names of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht_peer import DhtPeer
from nesa_node.swarm.hive import DHTID, DHTNode
from nesa_node.swarm.private import Membership
from nesa_node.swarm.validator import dht_id

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

        What any member names first comes first, then what any names second, and so on. A member
        names what it has kept for longest first; one that makes up thousands of statements takes
        no more of the first places than each of the others.
        """
        dht_key = self._membership.dht_key(key)
        own = self._node.protocol.storage.records_of(DHTID.generate(source=dht_key))
        with self._peer.noting_answers(dht_id(dht_key)) as answers:
            try:
                searching = self._node.get(dht_key, latest=members is None, num_workers=members)
                found = await self._peer.run(searching, FETCH_TIMEOUT_S)
            except TimeoutError:
                log.warning("directory_timed_out", timeout_s=FETCH_TIMEOUT_S)
                return ()
        if found is None or not isinstance(found.value, dict):
            return ()
        places = _places([[subkey for subkey, _, _ in own], *answers])
        items = sorted(found.value.items(), key=lambda item: places.get(item[0], len(places)))
        return [item.value for _, item in items if isinstance(item.value, bytes)]


def _places(answers: Iterable[Sequence[str]]) -> dict[str, int]:
    """The first place that any answer gives to each name."""
    places: dict[str, int] = {}
    for names in answers:
        for place, name in enumerate(names):
            if place < places.get(name, place + 1):
                places[name] = place
    return places
