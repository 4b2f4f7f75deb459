"""Table of a server's open connections, which decides which of them to drop for a new one."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

KEY_SHARE = 0.75
"""Maximum fraction of a server's connections that one key may have."""
_AT_ONCE = 32
"""An owner's number of connections per additional one that is dropped at once."""


class Peer(Protocol):
    """Interface of a connection in the table."""

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the client to send a request or to read a response."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionTable:
    """At most `most` connections; one more drops a connection that waits for its client.

    Connections without a key are dropped first, then idle ones with a key; among them the oldest of
    the address or key with the most connections. So idle connections block no request, and an
    address with many loses one before an address with few. Connections with a response in progress
    stay, unless a client without a key does not read it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # The owner is the client's address, or the key that was shown. The oldest come first.
        self._owners: dict[Peer, str] = {}
        self._known: set[Peer] = set()
        self._surplus: set[Peer] = set()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, peer: Peer, address: str) -> None:
        """Add a new connection from `address`; a waiting one may be dropped for it."""
        self._own(peer, f"address {address}")
        if not self._make_room(peer):
            self._surplus.add(peer)

    def remove(self, peer: Peer) -> None:
        """Remove a closed connection. May be called twice."""
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
        """Assign `peer` to a key; False if the key already has too many connections."""
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
        """Waiting connections to drop; several of a large owner, since the search takes 1 ms."""
        waiting = [peer for peer in self._owners if peer is not newcomer and peer.is_waiting]
        candidates = [peer for peer in waiting if peer not in self._known] or waiting
        owners = {self._owners[peer]: None for peer in candidates}
        most = max(owners, key=self._counts.__getitem__, default="")
        several = 1 + self._counts[most] // _AT_ONCE
        return [peer for peer in candidates if self._owners[peer] == most][:several]
