"""State of one Kademlia lookup: the contacts to ask next, and the nearest that have answered.

A malicious member can invent contacts nearer to a key than all real members: identities are free,
and 6,000 of them are tried in 10 ms. hivemind's lookup counts contacts among the nearest before
they have answered, so that one such member hides all real ones. Here:

- only contacts that have answered count among the nearest;
- of the contacts that one member refers to, at most `MAX_UNANSWERED_PER_REFERRER` are asked without
an answer;
- members take turns: the next contact comes from the member with the fewest unanswered contacts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from nesa_node.swarm.p2p.hivemind_imports import DHTID, PeerID

BUCKET_SIZE = 20
"""Kademlia's k: a lookup ends when the k nearest contacts have answered, or all known ones."""
MAX_UNANSWERED_PER_REFERRER = 4
"""Contacts of one referring member that may be asked without an answer."""
MAX_CONTACTS_ASKED = 100
"""Contacts asked in one lookup: a chain of answering ones could otherwise prolong it forever."""


class ContactState(Enum):
    REFERRED = auto()
    ASKED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Contact:
    """A candidate member: `referrers` have referred to it, and it is asked on behalf of
    `asked_for`.
    """

    node_id: DHTID
    peer_id: PeerID
    distance: int
    referrers: list[DHTID] = field(default_factory=list)
    asked_for: DHTID | None = None
    state: ContactState = ContactState.REFERRED


class IterativeLookup:
    """Iterative lookup of `key` by the node `own`, starting from its routing table `known`.

    `MAX_UNANSWERED_PER_REFERRER` does not bound `known` contacts: each has answered or called this
    node before.
    """

    def __init__(self, key: DHTID, own: DHTID, known: Mapping[DHTID, PeerID]) -> None:
        self._key = key
        self._own = own
        self._contacts: dict[DHTID, Contact] = {}
        self._num_asked = 0
        self._num_unanswered: Counter[DHTID] = Counter()
        """By referring member: its contacts that were asked and have not answered."""
        self._add_contacts(own, known)

    def next_contact(self) -> Contact | None:
        """Choose the contact to ask next and mark it as asked; None if there is none now."""
        places = sorted(
            each.distance for each in self._contacts.values() if self._counts_as_near(each)
        )
        limit = places[BUCKET_SIZE - 1] if len(places) >= BUCKET_SIZE else math.inf
        choices = (
            (self._num_unanswered[namer], contact.distance, contact, namer)
            for contact in self._in_state(ContactState.REFERRED)
            if contact.distance <= limit
            for namer in self._usable_referrers(contact)
        )
        best = min(choices, key=lambda choice: choice[:2], default=None)
        if best is None or self._num_asked >= MAX_CONTACTS_ASKED:
            return None
        _, _, contact, namer = best
        contact.asked_for = namer
        contact.state = ContactState.ASKED
        self._num_asked += 1
        self._num_unanswered[namer] += 1
        return contact

    def mark_answered(self, contact: Contact, referred: Mapping[DHTID, PeerID]) -> None:
        contact.state = ContactState.ANSWERED
        assert contact.asked_for is not None
        self._num_unanswered[contact.asked_for] -= 1
        self._add_contacts(contact.node_id, referred)

    def mark_failed(self, contact: Contact) -> None:
        contact.state = ContactState.FAILED

    def nearest(self) -> list[Contact]:
        """The `BUCKET_SIZE` nearest contacts that have answered, the nearest first."""
        answered = self._in_state(ContactState.ANSWERED)
        return sorted(answered, key=lambda contact: contact.distance)[:BUCKET_SIZE]

    def _counts_as_near(self, contact: Contact) -> bool:
        """Whether `contact` may belong to the nearest, so that farther ones wait."""
        if contact.state is ContactState.REFERRED:
            # A contact that only one other member refers to may be invented.
            is_likely = len(contact.referrers) > 1 or contact.referrers == [self._own]
            return is_likely and bool(self._usable_referrers(contact))
        return contact.state in (ContactState.ASKED, ContactState.ANSWERED)

    def _usable_referrers(self, contact: Contact) -> list[DHTID]:
        return [
            namer
            for namer in contact.referrers
            if namer == self._own or self._num_unanswered[namer] < MAX_UNANSWERED_PER_REFERRER
        ]

    def _add_contacts(self, referrer: DHTID, referred: Mapping[DHTID, PeerID]) -> None:
        for node_id, peer_id in referred.items():
            if node_id == self._own:
                continue
            contact = self._contacts.get(node_id)
            if contact is None:
                contact = Contact(node_id, peer_id, node_id.xor_distance(self._key))
                self._contacts[node_id] = contact
            if self._own not in contact.referrers:
                contact.referrers.append(referrer)

    def _in_state(self, *states: ContactState) -> Iterable[Contact]:
        return (contact for contact in self._contacts.values() if contact.state in states)
