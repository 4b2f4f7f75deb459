"""The open connections of one server, and which one makes room for a new one."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

KEY_SHARE = 0.75
"""Of the connections that a server holds, at most so many are one key's."""
_AT_ONCE = 32
"""One more connection of an address or key is dropped at once for each so many that it has."""


class Peer(Protocol):
    """A connection as the table sees it."""

    @property
    def is_waiting(self) -> bool:
        """Whether the client is to send a request, or the rest of one, or to read an answer."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionTable:
    """At most `most` connections. For one more, one is dropped that waits for its other side.

    First those that have shown no key, then those that are idle between requests; among them the
    oldest of the address, or key, that has most. So silent connections keep no request out, however
    many there are, and an address with many makes room before one with few. What is being answered
    stays, unless a client without a key does not read it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order in which they came; the address, or the key that was shown.
        self._owners: dict[Peer, str] = {}
        self._known: set[Peer] = set()
        self._surplus: set[Peer] = set()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, peer: Peer, address: str) -> None:
        """A new connection from `address`; one that waits may be dropped for it."""
        self._own(peer, f"address {address}")
        if not self._make_room(peer):
            self._surplus.add(peer)

    def remove(self, peer: Peer) -> None:
        """It has ended. May be called twice."""
        owner = self._owners.pop(peer, None)
        if owner is not None:
            self._count(owner, -1)
        self._known.discard(peer)
        self._surplus.discard(peer)

    def has_room(self, peer: Peer) -> bool:
        """Whether a request of this connection may be answered."""
        if peer in self._surplus and self._make_room(peer):
            self._surplus.discard(peer)
        return peer not in self._surplus

    def know(self, peer: Peer, key: str) -> bool:
        """`peer` has shown a key; False: connections of this key are too many without it."""
        owner = f"key {key}"
        if peer not in self._owners or self._owners[peer] == owner:
            return True
        if self._counts[owner] >= self._most * KEY_SHARE:
            return False
        self._count(self._owners[peer], -1)
        self._own(peer, owner)
        self._known.add(peer)
        return True

    def is_known(self, peer: Peer) -> bool:
        return peer in self._known

    def _own(self, peer: Peer, owner: str) -> None:
        self._owners[peer] = owner
        self._count(owner, 1)

    def _count(self, owner: str, change: int) -> None:
        self._counts[owner] += change
        if not self._counts[owner]:
            del self._counts[owner]

    def _make_room(self, newcomer: Peer) -> bool:
        if len(self) > self._most:
            for victim in self._victims(newcomer):
                self.remove(victim)
                victim.drop()
        return len(self) <= self._most

    def _victims(self, newcomer: Peer) -> list[Peer]:
        """Several of an owner with many, since looking at all of them takes 1 ms."""
        waiting = [peer for peer in self._owners if peer is not newcomer and peer.is_waiting]
        candidates = [peer for peer in waiting if peer not in self._known] or waiting
        owners = {self._owners[peer]: None for peer in candidates}
        most = max(owners, key=self._counts.__getitem__, default="")
        several = 1 + self._counts[most] // _AT_ONCE
        return [peer for peer in candidates if self._owners[peer] == most][:several]
