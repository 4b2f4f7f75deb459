"""Leader election of orchestrators: a lease that its holder renews, and the order of successors.

A lease among untrusted peers is not consensus. In a network partition each side may have a leader;
when it heals one of them yields: the one with the lower epoch, or with equal epochs the higher peer
id. Nodes judge placements by their epoch and score, not by the leader.

All functions are pure; times are Unix seconds passed by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nesa_node.core.ids import ModelId, PeerId

Role = Literal["leading", "ready"]


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """The announcement of one candidate: "leading" in `epoch`, or "ready" to succeed."""

    signer: PeerId
    role: Role
    epoch: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Timing of leases: lifetime `ttl_s`, and the delay before succession.

    Without a leader, the candidate of rank k (from 1) takes the lease after k times
    `succession_delay_s`. If that is shorter than a claim takes to reach the other candidates,
    several succeed at once and all but one yield again.
    """

    ttl_s: float
    succession_delay_s: float


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """State of one candidate between two reads of the claims.

    `epoch`: the highest seen, so that a later leader has a higher one. `vacant_since`: when the
    lease was first seen without a holder.
    """

    peer: PeerId
    model: ModelId
    role: Role = "ready"
    epoch: int = 0
    vacant_since: float | None = None
    ignored: frozenset[PeerId] = field(default_factory=frozenset)
    """Signers that are distrusted or not allowed; their claims do not count."""

    def observe_claims(
        self, claims: Iterable[LeaseClaim], terms: LeaseTerms, now: float
    ) -> LeaseCandidate:
        """The next state after reading the `claims` of all candidates."""
        alive = [
            claim
            for claim in claims
            if claim.expires_at > now
            and claim.signer != self.peer
            and claim.signer not in self.ignored
        ]
        leader = find_leading_claim(alive, now)
        epoch = max([self.epoch, *(claim.epoch for claim in alive)])
        if self.role == "leading":
            if leader is not None and _outranks(leader, self.epoch, self.peer):
                return replace(self, role="ready", epoch=epoch, vacant_since=None)
            return self
        if leader is not None:
            return replace(self, epoch=epoch, vacant_since=None)
        since = now if self.vacant_since is None else self.vacant_since
        ranked = rank_successors(self.model, [self.peer, *(claim.signer for claim in alive)])
        # The first in rank waits too: a leader may have yielded to a claim not yet seen here.
        if now >= since + (ranked.index(self.peer) + 1) * terms.succession_delay_s:
            return replace(self, role="leading", epoch=epoch + 1, vacant_since=None)
        return replace(self, epoch=epoch, vacant_since=since)


def find_leading_claim(claims: Iterable[LeaseClaim], now: float) -> LeaseClaim | None:
    """The unexpired "leading" claim with the highest epoch, then the lowest peer id."""
    leading = [claim for claim in claims if claim.role == "leading" and claim.expires_at > now]
    return min(leading, key=lambda claim: (-claim.epoch, claim.signer), default=None)


def rank_successors(model: ModelId, candidates: Sequence[PeerId]) -> list[PeerId]:
    """The candidates in order of succession, which differs by model to spread the work."""

    def place(peer: PeerId) -> bytes:
        return hashlib.sha256(f"{peer} {model}".encode()).digest()

    return sorted(set(candidates), key=place)


def _outranks(claim: LeaseClaim, epoch: int, peer: PeerId) -> bool:
    return (-claim.epoch, claim.signer) < (-epoch, peer)
