"""Evidence on a real DHT: published, checked by each reader, repeated by nodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import ModelId
from nesa_node.swarm.dht.sealing import (
    EVIDENCE_MAX_TTL_S,
    MAX_LISTED_EVIDENCE,
    EvidenceNotice,
    ListedContradiction,
    SignedSeal,
    seal_statement,
)
from nesa_node.swarm.evidence import (
    MIN_SIGNERS,
    EvidenceExchange,
    Proof,
    check_contradiction,
    find_proof,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.seal_messages import Seal
from tests.swarm.local_swarm import local_swarm
from tests.swarm.notice_fields import make_notice
from tests.swarm.record_fields import MODEL_ID, make_record, make_status
from tests.swarm.seals import make_proof, make_seal

MODEL = ModelId(MODEL_ID)
BLOCKS = 30


def exchange(member: Swarm, **options: Any) -> EvidenceExchange:
    return EvidenceExchange(member, MODEL, BLOCKS, **options)


def listed(accused: Identity, *seals: Seal) -> ListedContradiction:
    signed = tuple(SignedSeal(statement=each.statement, signature=each.signature) for each in seals)
    return ListedContradiction(accused=accused.peer_id, seals=signed)


async def know(members: list[Swarm]) -> None:
    """Each member serves the model and knows of the rest."""
    for member in members:
        await member.directory.publish(make_status())
    for member in members:
        await member.directory.fetch(MODEL)


async def published(member: Swarm) -> dict[str, set[str]]:
    """Signers by accused node, as the DHT has them."""
    signers: dict[str, set[str]] = {}
    for notice in await member.notices.fetch(EvidenceNotice, MODEL):
        for each in notice.contradictions:
            signers.setdefault(each.accused, set()).add(notice.peer_id)
    return signers


async def test_a_node_that_contradicts_itself_is_known_to_all(tmp_path: Path) -> None:
    """Its finder need not stay: readers repeat what they have checked, but not for ever."""
    async with local_swarm(tmp_path, 4) as members:
        await know(members)
        accused, finder, *readers = members
        proof = make_proof(accused.identity)
        await exchange(finder).publish(proof)
        exchanges = [exchange(reader) for reader in readers]
        for each in exchanges:
            assert await each.read() == [proof]
            assert await each.read() == []
            await each.repeat()
        signers = await published(finder)
        assert signers == {accused.identity.peer_id: {s.identity.peer_id for s in members[1:]}}
        assert len(signers[accused.identity.peer_id]) == MIN_SIGNERS
        # It learns of it, too, and publishes nothing of itself, nor what many publish.
        own = exchange(accused)
        assert await own.read() == [proof]
        await own.repeat()
        assert await published(finder) == signers


async def test_evidence_is_renewed_before_it_expires(tmp_path: Path) -> None:
    now = time.time()
    async with local_swarm(tmp_path, 2) as (accused, finder):
        await know([accused, finder])
        own = exchange(finder, clock=lambda: now)
        await own.publish(make_proof(accused.identity))
        (first,) = await finder.notices.fetch(EvidenceNotice, MODEL)
        await own.repeat()
        assert finder.notices.own_notice(EvidenceNotice, MODEL) == first
        now += 0.6 * EVIDENCE_MAX_TTL_S
        await own.repeat()
        (second,) = await finder.notices.fetch(EvidenceNotice, MODEL)
        assert second.expires_at > first.expires_at


async def test_no_honest_node_is_convicted(tmp_path: Path) -> None:
    """By forged seals, its own honest ones, those of two sessions, or another node's."""
    async with local_swarm(tmp_path, 3) as members:
        await know(members)
        honest, accuser, reader = members
        mine, theirs = honest.identity, accuser.identity
        first = make_seal(mine)
        forged = Seal(statement=make_seal(mine, root=b"s").statement, signature=first.signature)
        stolen = Seal(
            statement=first.statement, signature=make_seal(theirs, node=mine.peer_id).signature
        )
        for number, seals in enumerate(
            (
                (first, forged),
                (first, stolen),
                (first, first),
                (first, make_seal(mine, root=b"s", nonce=b"m" * 16)),
                (first, make_seal(mine, root=b"s", number=2, cuts=2)),
                (first, make_seal(mine, root=b"s", number=2, epoch=2, cuts=2)),
                (first, make_seal(theirs, root=b"s")),
                (make_seal(theirs), make_seal(theirs, root=b"s")),
            )
        ):
            item = listed(mine, *seals)
            with pytest.raises(ProtocolError) as caught:
                check_contradiction(item)
            assert caught.value.code in ("bad_seal", "no_contradiction"), number
            await accuser.notices.publish(EvidenceNotice, MODEL, ttl_s=60, contradictions=(item,))
            reading = exchange(reader)
            assert await reading.read() == []
            assert await reading.read() == []
            await reading.repeat()
        assert (await published(reader)).keys() == {mine.peer_id}
        assert reader.notices.own_notice(EvidenceNotice, MODEL) is None


async def test_a_crowd_of_accusers_hides_no_proof_and_is_not_repeated(tmp_path: Path) -> None:
    """Identities are free: so are proofs against them, and false ones against honest nodes."""
    async with local_swarm(tmp_path, 3) as (accused, finder, reader):
        await know([accused, finder, reader])
        proof = make_proof(accused.identity)
        await exchange(finder).publish(proof)
        junk = listed(accused.identity, make_seal(accused.identity), make_seal(reader.identity))
        lie = listed(finder.identity, make_seal(finder.identity), make_seal(accused.identity))
        for _ in range(2 * EvidenceNotice.bounds.max_per_key):
            sybil, victim = (Identity.ephemeral(tmp_path) for _ in range(2))
            items = lie, junk, make_proof(victim).listed
            notice = make_notice(
                EvidenceNotice, sybil, time.time(), model_id=MODEL, contradictions=items
            )
            await reader.notices.announce(notice, seal_statement(notice, sybil))
        reading = exchange(reader)
        found: list[Proof] = []
        for _ in range(3):
            found += await reading.read()
        assert found == [proof]
        await reading.repeat()
        own = reader.notices.own_notice(EvidenceNotice, MODEL)
        assert own is not None
        assert own.contradictions == (proof.listed,)


async def test_a_member_publishes_few_proofs_and_its_newest_first(tmp_path: Path) -> None:
    """Nodes that contradict themselves on purpose take no more room than that."""
    async with local_swarm(tmp_path, 1) as (member,):
        own = exchange(member)
        liars = [Identity.ephemeral(tmp_path) for _ in range(MAX_LISTED_EVIDENCE + 2)]
        for liar in liars:
            record = make_record(liar, time.time())
            member.directory._records.add(record)
            await own.publish(make_proof(liar))
        await own.repeat()
        notice = member.notices.own_notice(EvidenceNotice, MODEL)
        assert notice is not None
        assert {each.accused for each in notice.contradictions} == {
            liar.peer_id for liar in liars[-MAX_LISTED_EVIDENCE:]
        }
        # As large as a notice may be; two of these do not fit into one.
        for liar in liars[:2]:
            await own.publish(make_proof(liar, count=30))
        notice = member.notices.own_notice(EvidenceNotice, MODEL)
        assert notice is not None
        assert [each.accused for each in notice.contradictions] == [liars[1].peer_id]
        await own.publish(make_proof(liars[2], count=100))
        assert member.notices.own_notice(EvidenceNotice, MODEL) == notice


def test_seals_that_a_node_did_not_sign_prove_nothing(tmp_path: Path) -> None:
    one, other = (Identity.ephemeral(tmp_path) for _ in range(2))
    seals = [make_seal(one), make_seal(other, root=b"s"), make_seal(one, number=2)]
    assert find_proof(one.peer_id, seals) is None
    seals.append(make_seal(one, root=b"t", number=3))
    proof = find_proof(one.peer_id, seals)
    assert proof is not None
    assert check_contradiction(proof.listed) == proof
