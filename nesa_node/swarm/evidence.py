"""Evidence against nodes of a model: published, read, checked and repeated.

Each node that has checked a proof repeats it under its own name while few do: of the signers in a
full key of the DHT those known for the shortest time are evicted, and a client may be gone soon.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nesa_node.core.errors import ProtocolError, RecordError, SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.dht.sealing import (
    EVIDENCE_MAX_TTL_S,
    MAX_LISTED_EVIDENCE,
    EvidenceNotice,
    ListedContradiction,
    SignedSeal,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.seal_messages import Seal, open_seal
from nesa_node.verification.evidence import find_contradiction

log = get_logger(__name__)

EVIDENCE_INTERVAL_S = 300.0
"""Time between two readings."""
MIN_SIGNERS = 3
"""Signers below which a member that has checked a proof repeats it."""
_START_DELAY_S = 30.0
"""Longest wait before a node's first reading: nodes may start together."""
_MAX_REMEMBERED = 1024
"""Nodes and pairs of seals of which the outcome of a check is remembered."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A contradiction that was checked: `reason` says what of the accused node's is wrong."""

    accused: PeerId
    reason: str
    listed: ListedContradiction


def find_proof(accused: PeerId, seals: Iterable[Seal]) -> Proof | None:
    """The first two of a node's seals that contradict each other; those that it did not sign are
    left out."""
    opened = []
    for seal in seals:
        try:
            opened.append((seal, open_seal(seal, accused).state))
        except ProtocolError as error:
            log.debug("seal_not_opened", peer=accused, reason=str(error))
    for (one, stated), (other, stated_too) in itertools.combinations(opened, 2):
        if (reason := find_contradiction(stated, stated_too)) is not None:
            signed = tuple(
                SignedSeal(statement=each.statement, signature=each.signature)
                for each in (one, other)
            )
            return Proof(accused, reason, ListedContradiction(accused=accused, seals=signed))
    return None


def check_contradiction(listed: ListedContradiction) -> Proof:
    """What is wrong by two seals that any peer may have listed.

    Raises `ProtocolError`: "bad_seal" for one that the accused node did not sign or that is
    malformed, "no_contradiction" for two that an honest node may have signed.
    """
    accused = PeerId(listed.accused)
    one, other = (
        open_seal(Seal(statement=each.statement, signature=each.signature), accused).state
        for each in listed.seals
    )
    reason = find_contradiction(one, other)
    if reason is None:
        raise ProtocolError("no_contradiction", f"both seals of {accused} can be true")
    return Proof(accused, reason, listed)


class EvidenceExchange:
    """What one member publishes, and has checked, of evidence against the nodes of a model.

    Evidence against any other peer is not looked at: identities are free.
    """

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        num_blocks: int,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives seconds since the epoch."""
        self._swarm = swarm
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._clock = clock
        self._published: dict[PeerId, Proof] = {}
        self._proven: LruTable[PeerId, Proof] = LruTable(_MAX_REMEMBERED)
        self._refused: LruTable[bytes, None] = LruTable(_MAX_REMEMBERED)

    async def publish(self, proof: Proof) -> None:
        """Publish a proof that this member found, in place of its oldest one if there are many.

        One that does not fit into a notice is logged. Raises `PeerUnreachableError` if this node's
        own p2pd has ended.
        """
        self._proven.put(proof.accused, proof)
        self._published.pop(proof.accused, None)
        if len(self._published) == MAX_LISTED_EVIDENCE:
            del self._published[next(iter(self._published))]
        self._published[proof.accused] = proof
        await self._announce()

    async def read(self) -> list[Proof]:
        """Read the notices; returns what they prove against nodes of which nothing was known.

        Raises the `SwarmError`s of the DHT.
        """
        notices = await self._swarm.notices.fetch(EvidenceNotice, self._model_id)
        peers = self._find_peers()
        listed = [each for notice in notices for each in notice.contradictions]
        unknown = [
            each
            for each in random.sample(listed, len(listed))
            if each.accused in peers and each.accused not in self._proven
        ]
        found = await asyncio.to_thread(self._check, unknown)
        for proof in found:
            self._proven.put(proof.accused, proof)
        return found

    async def repeat(self) -> None:
        """Publish what was proven and few members publish, and renew what this one does.

        Raises as `publish` does.
        """
        notices = self._swarm.notices.known_notices(EvidenceNotice, self._model_id)
        # Of these very seals: what else is listed of a node may be anything.
        signers = Counter(each for notice in notices for each in notice.contradictions)
        peers = self._find_peers() - {self._swarm.identity.peer_id}
        before, self._published = self._published, {}
        for accused, proof in {**before, **self._proven}.items():
            is_wanted = accused in before or signers[proof.listed] < MIN_SIGNERS
            if accused in peers and is_wanted and len(self._published) < MAX_LISTED_EVIDENCE:
                self._published[accused] = proof
        own = self._swarm.notices.own_notice(EvidenceNotice, self._model_id)
        is_old = own is None or own.expires_at < self._clock() + EVIDENCE_MAX_TTL_S / 2
        if self._published.keys() - before.keys() or is_old:
            await self._announce()

    async def run(self, on_proof: Callable[[Proof], None]) -> None:
        """Read and repeat now and then until cancelled; `on_proof` is called with new proofs."""
        await asyncio.sleep(random.uniform(0.0, min(_START_DELAY_S, EVIDENCE_INTERVAL_S)))
        while True:
            try:
                for proof in await self.read():
                    on_proof(proof)
                await self.repeat()
            except (SwarmError, OSError, TimeoutError) as error:
                log.info("evidence_not_read", reason=str(error))
            except Exception:  # a bug must end neither the node nor its other services
                log.exception("evidence_not_read")
            await asyncio.sleep(EVIDENCE_INTERVAL_S * random.uniform(0.8, 1.2))

    def _find_peers(self) -> frozenset[PeerId]:
        """Nodes of the model, this one among them."""
        known = self._swarm.directory.addresses(self._model_id, self._num_blocks)
        return frozenset(known) | {self._swarm.identity.peer_id}

    def _check(self, listed: Iterable[ListedContradiction]) -> list[Proof]:
        """Check evidence, of each node until one proof holds. Blocks the thread."""
        found: dict[PeerId, Proof] = {}
        for each in listed:
            parts = (
                each.accused.encode(),
                *(seal.signature + seal.statement for seal in each.seals),
            )
            digest = hashlib.sha256(b"\0".join(parts)).digest()
            if PeerId(each.accused) in found or digest in self._refused:
                continue
            try:
                found[PeerId(each.accused)] = check_contradiction(each)
            except ProtocolError as error:
                self._refused.put(digest, None)
                log.debug("evidence_refused", peer=each.accused, reason=str(error))
        return list(found.values())

    async def _announce(self) -> None:
        while self._published:
            try:
                await self._swarm.notices.publish(
                    EvidenceNotice,
                    self._model_id,
                    ttl_s=EVIDENCE_MAX_TTL_S,
                    contradictions=tuple(each.listed for each in self._published.values()),
                )
                return
            except RecordError as error:
                accused = next(iter(self._published))
                log.warning("evidence_not_published", peer=accused, reason=str(error))
                del self._published[accused]
