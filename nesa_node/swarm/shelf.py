"""Store of sealed statements on the DHT, by the names of their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from nesa_node.swarm.dht_node import MemberNode, Record
from nesa_node.swarm.hive import DHTID
from nesa_node.swarm.known_records import MAX_NODES_PER_MODEL
from nesa_node.swarm.private import Membership

FETCH_TIMEOUT_S = 10.0


class Shelf:
    """Stores and finds sealed statements under keys derived by `Membership.dht_key`."""

    def __init__(self, node: MemberNode, membership: Membership) -> None:
        self._node = node
        self._membership = membership

    async def put(
        self, keys: Sequence[str], sealed: bytes, expires_at: float, subkey: str
    ) -> str | None:
        """Store `sealed` under all of `keys`. Returns None, or one key's failure in a word."""
        value = msgspec.msgpack.encode(sealed)
        failures = await asyncio.gather(
            *(self._node.store(self._id(key), subkey, value, expires_at) for key in keys)
        )
        return next((failure for failure in failures if failure is not None), None)

    async def find(self, key: str, *, members: int | None = None) -> Iterable[bytes]:
        """Find the valid statements under `key`; empty if no member answers.

        Returns each signer's newest statement, from all members near `key` that answer within
        `FETCH_TIMEOUT_S`. With `members`, that many are asked at once and only the first answer
        with statements counts: with one, a tenth of the traffic, but the result may be incomplete.

        A member lists what it has kept for longest first. The result has all members' first
        statements first, then all second ones, and so on, so that a member that invents thousands
        gets no more of the first places than any other member.
        """
        newest: dict[str, tuple[float, bytes]] = {}
        answers: list[list[str]] = []

        def take(records: list[Record]) -> bool:
            answers.append([subkey for subkey, _, _ in records[:MAX_NODES_PER_MODEL]])
            for subkey, value, expires_at in records:
                if subkey not in newest or newest[subkey][0] < expires_at:
                    newest[subkey] = expires_at, value
            return members is not None and bool(newest)

        key_id = self._id(key)
        if not take(self._node.protocol.storage.records_of(key_id)):
            parallel = {} if members is None else {"parallel": members}
            await self._node.look_up(key_id, take, limit_s=FETCH_TIMEOUT_S, **parallel)
        places = _places(answers)
        subkeys = sorted(newest, key=lambda subkey: places.get(subkey, len(places)))
        return [msgspec.msgpack.decode(newest[subkey][1], type=bytes) for subkey in subkeys]

    def _id(self, key: str) -> DHTID:
        return DHTID.generate(source=self._membership.dht_key(key))


def _places(answers: Iterable[Sequence[str]]) -> dict[str, int]:
    """Best rank of each name in any of `answers`."""
    places: dict[str, int] = {}
    for names in answers:
        for place, name in enumerate(names):
            if place < places.get(name, place + 1):
                places[name] = place
    return places
