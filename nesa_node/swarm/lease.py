"""Lease of the right to orchestrate a model, held through the DHT (`routing/succession.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.succession import Candidate, Claim, Terms, holder
from nesa_node.swarm.notice_board import NoticeBoard
from nesa_node.swarm.notices import Lease

log = get_logger(__name__)

DEFAULT_TERMS = Terms(ttl_s=60.0, patience_s=20.0)
"""A lease is renewed every quarter of its life; a successor waits until it has seen all claims."""


@dataclass(frozen=True, slots=True)
class Whom:
    """Signers that may lead: the `allowed` ones (all, if empty) except distrusted ones."""

    allowed: frozenset[PeerId] = frozenset()

    def ignored(self, signers: Iterable[PeerId], liars: Collection[PeerId]) -> frozenset[PeerId]:
        return frozenset(
            signer
            for signer in signers
            if signer in liars or (self.allowed and signer not in self.allowed)
        )


class LeaseKeeper:
    """Candidate for the lease of one model; `step` runs every quarter of `terms.ttl_s`."""

    def __init__(
        self,
        board: NoticeBoard,
        peer: PeerId,
        model: ModelId,
        *,
        clock: Callable[[], float],
        whom: Whom = Whom(),
        liars: Collection[PeerId] = (),
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        """`liars`, distrusted signers, may grow while the keeper runs."""
        self.terms = terms
        self._board = board
        self._clock = clock
        self._whom = whom
        self._liars = liars
        self._state = Candidate(peer, model)

    @property
    def leads(self) -> bool:
        return self._state.role == "leading"

    @property
    def epoch(self) -> int:
        return self._state.epoch

    async def step(self) -> None:
        """Fetch all claims, decide this node's role and publish it.

        Raises as `NoticeBoard.publish` does.
        """
        before = self._state
        claims = await self._claims()
        ignored = self._whom.ignored((claim.signer for claim in claims), self._liars)
        state = replace(before, ignored=ignored).look(claims, self.terms, self._clock())
        self._state = replace(state, epoch=min(state.epoch, int(self._clock())))
        if self._state.role != before.role:
            event = "lease_taken" if self.leads else "lease_yielded"
            log.info(event, model=self._state.model, epoch=self.epoch)
        await self._board.publish(
            Lease,
            self._state.model,
            epoch=self.epoch,
            ttl_s=self.terms.ttl_s,
            role=self._state.role,
        )

    async def leave(self) -> None:
        """Release the lease, so that a successor can take it at once."""
        if self.leads:
            self._state = replace(self._state, role="ready")
            log.info("lease_released", model=self._state.model, epoch=self.epoch)
        await self._board.publish(
            Lease, self._state.model, epoch=self.epoch, ttl_s=0.5, role="ready"
        )

    async def run(self) -> None:
        """Call `step` periodically until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self.terms.ttl_s / 4)

    async def _claims(self) -> list[Claim]:
        leases = await self._board.fetch(Lease, self._state.model)
        return [as_claim(lease) for lease in leases]


def as_claim(lease: Lease) -> Claim:
    return Claim(lease.signer, lease.role, lease.epoch, lease.expires_at)


def leader(leases: Iterable[Lease], now: float) -> PeerId | None:
    """The signer that holds the lease at `now`, among `leases`."""
    found = holder(map(as_claim, leases), now)
    return None if found is None else found.signer
