"""Lease of the right to orchestrate a model, held through the DHT (`routing/succession.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.succession import LeaseCandidate, LeaseClaim, LeaseTerms, find_leading_claim
from nesa_node.swarm.dht.notices import Lease
from nesa_node.swarm.notice_store import NoticeStore

log = get_logger(__name__)

DEFAULT_LEASE_TERMS = LeaseTerms(ttl_s=60.0, succession_delay_s=20.0)
"""A lease is renewed every quarter of its life; a successor waits until it has seen all claims."""


@dataclass(frozen=True, slots=True)
class LeaseEligibility:
    """Signers that may lead: the `allowed` ones (all, if empty) except distrusted ones."""

    allowed: frozenset[PeerId] = frozenset()

    def ineligible_signers(
        self, signers: Iterable[PeerId], distrusted: Collection[PeerId]
    ) -> frozenset[PeerId]:
        return frozenset(
            signer
            for signer in signers
            if signer in distrusted or (self.allowed and signer not in self.allowed)
        )


class LeaseKeeper:
    """Candidate for the lease of one model; `step` runs every quarter of `terms.ttl_s`."""

    def __init__(
        self,
        notices: NoticeStore,
        peer: PeerId,
        model: ModelId,
        *,
        clock: Callable[[], float],
        eligibility: LeaseEligibility = LeaseEligibility(),
        distrusted: Collection[PeerId] = (),
        terms: LeaseTerms = DEFAULT_LEASE_TERMS,
    ) -> None:
        """`distrusted`, distrusted signers, may grow while the keeper runs."""
        self.terms = terms
        self._notices = notices
        self._clock = clock
        self._eligibility = eligibility
        self._distrusted = distrusted
        self._state = LeaseCandidate(peer, model)

    @property
    def is_leader(self) -> bool:
        return self._state.role == "leading"

    @property
    def epoch(self) -> int:
        return self._state.epoch

    async def step(self) -> None:
        """Fetch all claims, decide this node's role and publish it.

        Raises as `NoticeStore.publish` does.
        """
        before = self._state
        claims = await self._claims()
        ignored = self._eligibility.ineligible_signers(
            (claim.signer for claim in claims), self._distrusted
        )
        state = replace(before, ignored=ignored).observe_claims(claims, self.terms, self._clock())
        self._state = replace(state, epoch=min(state.epoch, int(self._clock())))
        if self._state.role != before.role:
            event = "lease_taken" if self.is_leader else "lease_yielded"
            log.info(event, model=self._state.model, epoch=self.epoch)
        await self._notices.publish(
            Lease,
            self._state.model,
            epoch=self.epoch,
            ttl_s=self.terms.ttl_s,
            role=self._state.role,
        )

    async def release(self) -> None:
        """Release the lease, so that a successor can take it at once."""
        if self.is_leader:
            self._state = replace(self._state, role="ready")
            log.info("lease_released", model=self._state.model, epoch=self.epoch)
        await self._notices.publish(
            Lease, self._state.model, epoch=self.epoch, ttl_s=0.5, role="ready"
        )

    async def run(self) -> None:
        """Call `step` periodically until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self.terms.ttl_s / 4)

    async def _claims(self) -> list[LeaseClaim]:
        leases = await self._notices.fetch(Lease, self._state.model)
        return [claim_of_lease(lease) for lease in leases]


def claim_of_lease(lease: Lease) -> LeaseClaim:
    return LeaseClaim(lease.signer, lease.role, lease.epoch, lease.expires_at)


def find_leader(leases: Iterable[Lease], now: float) -> PeerId | None:
    """The signer that holds the lease at `now`, among `leases`."""
    found = find_leading_claim(map(claim_of_lease, leases), now)
    return None if found is None else found.signer
