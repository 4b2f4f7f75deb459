"""State of one Kademlia lookup: the contacts to ask next, and the nearest that have answered.

A malicious member can invent contacts nearer to a key than all real members: identities are free,
and 6,000 of them are tried in 10 ms. hivemind's lookup counts contacts among the nearest before
they have answered, so that one such member hides all real ones. Here:

- only contacts that have answered count among the nearest;
- of the contacts that one member refers to, at most `MAX_UNANSWERED` are asked without an answer;
- members take turns: the next contact comes from the member with the fewest unanswered contacts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from nesa_node.swarm.hive import DHTID, PeerID

WIDTH = 20
"""Kademlia's k: a lookup ends when the k nearest contacts have answered, or all known ones."""
MAX_UNANSWERED = 4
"""Contacts of one referring member that may be asked without an answer."""
MAX_ASKED = 100
"""Contacts asked in one lookup: a chain of answering ones could otherwise prolong it forever."""


class State(Enum):
    NAMED = auto()
    ASKED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Contact:
    """A candidate member: `namers` have referred to it, and it is asked on behalf of `namer`."""

    node_id: DHTID
    peer_id: PeerID
    distance: int
    namers: list[DHTID] = field(default_factory=list)
    namer: DHTID | None = None
    state: State = State.NAMED


class Lookup:
    """Iterative lookup of `key` by the node `own`, starting from its routing table `known`.

    `MAX_UNANSWERED` does not bound `known` contacts: each has answered or called this node before.
    """

    def __init__(self, key: DHTID, own: DHTID, known: Mapping[DHTID, PeerID]) -> None:
        self._key = key
        self._own = own
        self._contacts: dict[DHTID, Contact] = {}
        self._num_asked = 0
        self._unanswered: Counter[DHTID] = Counter()
        """By referring member: its contacts that were asked and have not answered."""
        self._name(own, known)

    def next_contact(self) -> Contact | None:
        """Choose the contact to ask next and mark it as asked; None if there is none now."""
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
        """The `WIDTH` nearest contacts that have answered, the nearest first."""
        answered = self._in_state(State.ANSWERED)
        return sorted(answered, key=lambda contact: contact.distance)[:WIDTH]

    def _has_place(self, contact: Contact) -> bool:
        """Whether `contact` may belong to the nearest, so that farther ones wait."""
        if contact.state is State.NAMED:
            # A contact that only one other member refers to may be invented.
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
