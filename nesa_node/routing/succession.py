"""Who orchestrates: a lease that its holder renews, and who follows when it ends.

A lease among strangers is no consensus. While a network is split each side may have a leader; both
see each other when it heals, and one of them yields: the lower epoch, or of equal ones the higher
peer id. Whoever obeys placements looks at their epoch and their worth, not at who leads.

Everything here is pure: times are seconds since the epoch, and the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nesa_node.core.ids import ModelId, PeerId

Role = Literal["leading", "ready"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What one candidate says: "leading" in `epoch`, or "ready" to follow."""

    signer: PeerId
    role: Role
    epoch: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Terms:
    """A lease lives `ttl_s`. Once nobody leads, each candidate waits `patience_s` for itself and
    each one before it.

    Patience is for what takes time to be seen: with less than the time that a claim takes to reach
    the others, several would follow at once, and all but one of them yield again.
    """

    ttl_s: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one candidate remembers between two looks at the claims.

    `epoch` is the highest it has seen, so that a later leader has a higher one. `vacant_since` is
    when it first saw nobody lead.
    """

    peer: PeerId
    model: ModelId
    role: Role = "ready"
    epoch: int = 0
    vacant_since: float | None = None
    ignored: frozenset[PeerId] = field(default_factory=frozenset)
    """Signers whose claims do not count: they lied, or are not allowed."""

    def look(self, claims: Iterable[Claim], terms: Terms, now: float) -> Candidate:
        """Itself after it has seen the others' `claims`: leading or not, in which epoch."""
        alive = [
            claim
            for claim in claims
            if claim.expires_at > now
            and claim.signer != self.peer
            and claim.signer not in self.ignored
        ]
        leader = holder(alive, now)
        epoch = max([self.epoch, *(claim.epoch for claim in alive)])
        if self.role == "leading":
            if leader is not None and _before(leader, self.epoch, self.peer):
                return replace(self, role="ready", epoch=epoch, vacant_since=None)
            return self
        if leader is not None:
            return replace(self, epoch=epoch, vacant_since=None)
        since = now if self.vacant_since is None else self.vacant_since
        ranked = succession(self.model, [self.peer, *(claim.signer for claim in alive)])
        # The first waits too: a leader may have yielded to one that is not seen here yet.
        if now >= since + (ranked.index(self.peer) + 1) * terms.patience_s:
            return replace(self, role="leading", epoch=epoch + 1, vacant_since=None)
        return replace(self, epoch=epoch, vacant_since=since)

    def claim(self, terms: Terms, now: float) -> Claim:
        return Claim(self.peer, self.role, self.epoch, now + terms.ttl_s)


def holder(claims: Iterable[Claim], now: float) -> Claim | None:
    """Who leads, of those who say so: the highest epoch, of equal ones the lowest peer id."""
    leading = [claim for claim in claims if claim.role == "leading" and claim.expires_at > now]
    return min(leading, key=lambda claim: (-claim.epoch, claim.signer), default=None)


def succession(model: ModelId, candidates: Sequence[PeerId]) -> list[PeerId]:
    """The order in which candidates follow: for each model another one, so that work is shared."""

    def place(peer: PeerId) -> bytes:
        return hashlib.sha256(f"{peer} {model}".encode()).digest()

    return sorted(set(candidates), key=place)


def _before(claim: Claim, epoch: int, peer: PeerId) -> bool:
    return (-claim.epoch, claim.signer) < (-epoch, peer)
