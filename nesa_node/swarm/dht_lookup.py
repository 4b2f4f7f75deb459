"""Which contacts a search of the DHT asks, and which of them are the nearest to its key.

This is Kademlia's iterative lookup. A member can make up any number of contacts that are nearer to
a key than all members: identities are free, and 6,000 of them are tried in 10 ms. hivemind's search
counts contacts among the nearest before they have answered, so that one such member hid all others.
Therefore:

- only contacts that have answered are among the nearest;
- of the contacts that one member names, at most `MAX_UNANSWERED` are asked without an answer;
- members take turns: the next contact is one of the member of whose contacts the fewest that were
  asked have not answered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from nesa_node.swarm.hive import DHTID, PeerID

WIDTH = 20
"""A search ends when as many of the nearest contacts have answered, or all that there are."""
MAX_UNANSWERED = 4
MAX_ASKED = 100
"""Contacts in one search: real ones that lead from one to the next may be many, too."""


class State(Enum):
    NAMED = auto()
    ASKED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Contact:
    """`namers` have named it; it is asked on behalf of `namer`."""

    node_id: DHTID
    peer_id: PeerID
    distance: int
    namers: list[DHTID] = field(default_factory=list)
    namer: DHTID | None = None
    state: State = State.NAMED


class Lookup:
    """`own` is this node's id, and `known` are the contacts of its own table.

    Those are not bounded by `MAX_UNANSWERED`: each has answered or called this node before.
    """

    def __init__(self, key: DHTID, own: DHTID, known: Mapping[DHTID, PeerID]) -> None:
        self._key = key
        self._own = own
        self._contacts: dict[DHTID, Contact] = {}
        self._num_asked = 0
        self._unanswered: Counter[DHTID] = Counter()
        """Of the contacts that were asked on behalf of a member, those without an answer yet."""
        self._name(own, known)

    def next_contact(self) -> Contact | None:
        """The contact to ask next, from now on asked; None if there is none now."""
        places = sorted(each.distance for each in self._contacts.values() if self._has_place(each))
        limit = places[WIDTH - 1] if len(places) >= WIDTH else math.inf
        choices = (
            (self._unanswered[namer], contact.distance, contact, namer)
            for contact in self._in_state(State.NAMED)
            if contact.distance <= limit
            for namer in self._namers_with_room(contact)
        )
        best = min(choices, key=lambda choice: choice[:2], default=None)
        if best is None or self._num_asked >= MAX_ASKED:
            return None
        _, _, contact, namer = best
        contact.namer = namer
        contact.state = State.ASKED
        self._num_asked += 1
        self._unanswered[namer] += 1
        return contact

    def answered(self, contact: Contact, named: Mapping[DHTID, PeerID]) -> None:
        contact.state = State.ANSWERED
        assert contact.namer is not None
        self._unanswered[contact.namer] -= 1
        self._name(contact.node_id, named)

    def failed(self, contact: Contact) -> None:
        contact.state = State.FAILED

    def nearest(self) -> list[Contact]:
        """Those that have answered, the nearest first."""
        answered = self._in_state(State.ANSWERED)
        return sorted(answered, key=lambda contact: contact.distance)[:WIDTH]

    def _has_place(self, contact: Contact) -> bool:
        """Whether a contact that is farther is not worth a call yet."""
        if contact.state is State.NAMED:
            # What only one other member names may be made up.
            is_likely = len(contact.namers) > 1 or contact.namers == [self._own]
            return is_likely and bool(self._namers_with_room(contact))
        return contact.state in (State.ASKED, State.ANSWERED)

    def _namers_with_room(self, contact: Contact) -> list[DHTID]:
        return [
            namer
            for namer in contact.namers
            if namer == self._own or self._unanswered[namer] < MAX_UNANSWERED
        ]

    def _name(self, namer: DHTID, named: Mapping[DHTID, PeerID]) -> None:
        for node_id, peer_id in named.items():
            if node_id == self._own:
                continue
            contact = self._contacts.get(node_id)
            if contact is None:
                contact = Contact(node_id, peer_id, node_id.xor_distance(self._key))
                self._contacts[node_id] = contact
            if self._own not in contact.namers:
                contact.namers.append(namer)

    def _in_state(self, *states: State) -> Iterable[Contact]:
        return (contact for contact in self._contacts.values() if contact.state in states)
