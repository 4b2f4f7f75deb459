"""Store of notices: publishes this node's own, and fetches and remembers those of all signers.

Lease of the right to orchestrate a model, held through the DHT (`routing/succession.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeVar

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.succession import LeaseCandidate, LeaseClaim, LeaseTerms
from nesa_node.swarm.dht.member import DhtStore
from nesa_node.swarm.dht.sealing import Lease, Notice, notice_key, seal_statement
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.p2p.identity import Identity, Membership

log = get_logger(__name__)

_MAX_READ_FACTOR = 8
"""Notices read in one fetch, as a multiple of what one member keeps under a key."""
_MAX_TOPICS = 64
"""Remembered pairs of kind and model."""

_Kind = TypeVar("_Kind", bound=Notice)
_Topic = tuple[type[Notice], ModelId]


class NoticeStore:
    """Publishes, fetches and remembers notices; made by `open_swarm`.

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        store: DhtStore,
        identity: Identity,
        validator: RecordValidator,
        membership: Membership,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.membership = membership
        self.peer_ages = validator.peer_ages
        """How long this node has known each peer."""
        self._identity = identity
        self._validator = validator
        self._clock = clock
        self._known: dict[_Topic, dict[PeerId, Notice]] = {}
        self._pinned = {identity.peer_id}

    def signed_by(self, identity: Identity) -> NoticeStore:
        """A store that publishes in the name of another identity, through the same DHT node."""
        return NoticeStore(
            self.store, identity, self._validator, self.membership, clock=self._clock
        )

    def pin_signers(self, signers: Collection[PeerId]) -> None:
        """Never evict the notices of `signers`."""
        self._pinned.update(signers)

    async def publish(
        self,
        kind: type[_Kind],
        model_id: ModelId,
        *,
        epoch: int = 0,
        ttl_s: float,
        **fields: object,
    ) -> _Kind:
        """Sign a notice and store it in place of this node's last one of that kind and model.

        `fields` are those of its kind. A refusal by the DHT is logged, not raised. Raises
        `RecordError` if the notice is too large, `ValueError` if it breaks its kind's bounds, and
        `PeerUnreachableError` if this node's own p2pd has ended.
        """
        notice = self._make_notice(kind, model_id, epoch, ttl_s, fields)
        await self.announce(notice, seal_statement(notice, self._identity, self.membership))
        return notice

    def sign(
        self, kind: type[_Kind], model_id: ModelId, *, ttl_s: float, **fields: object
    ) -> tuple[_Kind, bytes]:
        """Sign a notice as `publish` does, for a later `announce`. Raises as `publish` does."""
        notice = self._make_notice(kind, model_id, 0, ttl_s, fields)
        return notice, seal_statement(notice, self._identity, self.membership)

    async def announce(self, notice: Notice, sealed: bytes) -> str | None:
        """Store a valid notice of any signer, in place of that signer's last one.

        Returns None, or a refusal by the DHT in a word, which is logged. Raises
        `PeerUnreachableError` if this node's own p2pd has ended.
        """
        self._remember(notice)
        key = notice_key(type(notice), ModelId(notice.model_id))
        failure = await self.store.put([key], sealed, notice.expires_at, notice.peer_id)
        if failure is not None:
            name = notice.bounds.name
            log.warning("notice_not_stored", kind=name, seq=notice.seq, reason=failure)
        return failure

    async def fetch(self, kind: type[_Kind], model_id: ModelId) -> list[_Kind]:
        """Fetch the notices of a kind about a model; returns all that are known and valid now."""
        await self.fetch_sealed(kind, model_id)
        return self.known_notices(kind, model_id)

    async def fetch_sealed(self, kind: type[_Kind], model_id: ModelId) -> list[tuple[_Kind, bytes]]:
        """Fetch as `fetch` does; returns what was found, each with its sealed bytes."""
        found = await self.store.find(notice_key(kind, model_id))
        read = islice(found, _MAX_READ_FACTOR * kind.bounds.max_per_key)
        pairs = []
        async for notice, sealed in self._validator.open_all(kind, read):
            if notice.model_id == model_id:
                self._remember(notice)
                pairs.append((notice, sealed))
        return pairs

    def known_notices(self, kind: type[_Kind], model_id: ModelId) -> list[_Kind]:
        """Remembered notices that have not expired, without network access."""
        now = self._clock()
        return [
            notice
            for notice in self._known.get((kind, model_id), {}).values()
            if notice.expires_at > now and isinstance(notice, kind)
        ]

    def open(self, kind: type[_Kind], sealed: bytes) -> _Kind:
        """Verify and parse a notice of any signer that is valid now. Raises `RecordError`."""
        return self._validator.open(kind, sealed)

    def own_notice(self, kind: type[_Kind], model_id: ModelId) -> _Kind | None:
        """The notice that this node published last, if it is still valid."""
        mine = self._identity.peer_id
        return next((n for n in self.known_notices(kind, model_id) if n.peer_id == mine), None)

    def _make_notice(
        self,
        kind: type[_Kind],
        model_id: ModelId,
        epoch: int,
        ttl_s: float,
        fields: dict[str, object],
    ) -> _Kind:
        """Make the next notice; its order and expiry rise, also after a restart."""
        now = self._clock()
        newest = self._validator.newest_notice(kind, model_id, self._identity.peer_id)
        (last_epoch, last_seq), last_expiry = newest or ((0, -1), 0.0)
        own = self.own_notice(kind, model_id)
        if own is not None:
            last_epoch, last_seq = max(own.order, (last_epoch, last_seq))
            last_expiry = max(own.expires_at, last_expiry)
        expires_at = max(now + ttl_s, last_expiry + 0.001)
        return kind.model_validate(
            {
                **fields,
                "model_id": model_id,
                "peer_id": self._identity.peer_id,
                "epoch": max(epoch, last_epoch),
                "seq": max(int(now * 1000), last_seq + 1),
                "issued_at": max(now, expires_at - kind.bounds.max_ttl_s),
                "expires_at": expires_at,
            }
        )

    def _remember(self, notice: Notice) -> None:
        topic = type(notice), ModelId(notice.model_id)
        notices = self._known.setdefault(topic, {})
        known = notices.get(notice.signer)
        if known is None or known.order < notice.order:
            notices[notice.signer] = notice
        if len(notices) > notice.bounds.max_per_key:
            self._evict(notices, notice.bounds.max_per_key)
        if len(self._known) > _MAX_TOPICS:
            self._known.pop(next(iter(self._known)))

    def _evict(self, notices: dict[PeerId, Notice], limit: int) -> None:
        """Evict expired notices, then those of the signers known for the shortest time.

        Pinned signers are kept.
        """
        now, known_s = self._clock(), self.peer_ages.known_s
        for peer in [peer for peer, notice in notices.items() if notice.expires_at <= now]:
            del notices[peer]
        while len(notices) > limit:
            others = [peer for peer in notices if peer not in self._pinned]
            if not others:
                return
            # Among signers known for equally long, the one that came last.
            del notices[min(reversed(others), key=known_s)]


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
        leases = await self._notices.fetch(Lease, before.model)
        claims = [
            LeaseClaim(lease.signer, lease.role, lease.epoch, lease.expires_at) for lease in leases
        ]
        ignored = self._eligibility.ineligible_signers(
            (claim.signer for claim in claims), self._distrusted
        )
        state = replace(before, ignored=ignored).observe_claims(claims, self.terms, self._clock())
        self._state = replace(state, epoch=min(state.epoch, int(self._clock())))
        if self._state.role != before.role:
            event = "lease_taken" if self.is_leader else "lease_yielded"
            log.info(event, model=self._state.model, epoch=self.epoch)
        await self._publish(self.terms.ttl_s, self._state.role)

    async def release(self) -> None:
        """Release the lease, so that a successor can take it at once."""
        if self.is_leader:
            self._state = replace(self._state, role="ready")
            log.info("lease_released", model=self._state.model, epoch=self.epoch)
        await self._publish(0.5, "ready")

    async def _publish(self, ttl_s: float, role: Literal["leading", "ready"]) -> None:
        model, epoch = self._state.model, self.epoch
        await self._notices.publish(Lease, model, epoch=epoch, ttl_s=ttl_s, role=role)
