"""Notices on a real DHT, and the room that members give them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht import storage as dht_storage
from nesa_node.swarm.dht.sealing import (
    FailureReport,
    Lease,
    Notice,
    PlacementNotice,
    ReportedFailure,
    seal_statement,
)
from nesa_node.swarm.dht.storage import BoundedStorage
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.hivemind_imports import DHTID, MSGPackSerializer
from nesa_node.swarm.p2p.identity import Identity, Membership
from tests.swarm.local_swarm import local_swarm
from tests.swarm.notice_fields import FIELDS, PEERS, make_notice
from tests.swarm.record_fields import MODEL_ID, make_status
from tests.turns import turns_of_the_loop

MODEL = ModelId(MODEL_ID)
KEY = DHTID(7)


async def test_every_member_and_a_client_read_what_each_published(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        addresses = members[0].transport.addresses
        leader, other, _ = members
        lease = await leader.notices.publish(Lease, MODEL, epoch=5, ttl_s=20, role="leading")
        placement = await leader.notices.publish(
            PlacementNotice, MODEL, epoch=5, ttl_s=60, **FIELDS[PlacementNotice]
        )
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=addresses, listen=False
        ) as client:
            failure = ReportedFailure(peer=PEERS[0], kind="lost", count=2, at=time.time() - 1)
            report = await client.notices.publish(
                FailureReport, MODEL, ttl_s=60, failures=(failure,)
            )
            for swarm in (*members, client):
                assert await swarm.notices.fetch(Lease, MODEL) == [lease]
                assert await swarm.notices.fetch(PlacementNotice, MODEL) == [placement]
                assert await swarm.notices.fetch(FailureReport, MODEL) == [report]
        assert other.notices.known_notices(FailureReport, MODEL) == [report]
        assert other.notices.own_notice(Lease, MODEL) is None
        assert leader.notices.own_notice(Lease, MODEL) == lease


async def test_later_notice_replaces_the_earlier_one_even_if_it_lives_shorter(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as (one, other):
        await one.notices.publish(Lease, MODEL, epoch=1, ttl_s=100, role="leading")
        later = await one.notices.publish(Lease, MODEL, epoch=1, ttl_s=5, role="ready")
        assert await other.notices.fetch(Lease, MODEL) == [later]


class _CrowdedShelf:
    async def find(self, key: str) -> list[bytes]:
        return [bytes([index % 256, index // 256]) for index in range(4000)]


async def test_crowd_of_notices_is_read_in_turns_and_not_to_its_end(tmp_path: Path) -> None:
    public = Membership(None)
    validator = RecordValidator(public, time.time)
    identity = Identity.ephemeral(tmp_path)
    shelf: Any = _CrowdedShelf()
    board = NoticeStore(shelf, identity, validator, public, clock=time.time)
    async with turns_of_the_loop() as turns:
        assert await board.fetch(Lease, MODEL) == []
    assert validator.dropped["malformed"] == 8 * Lease.bounds.max_per_key
    assert turns[0] >= validator.dropped["malformed"] // 16 - 1


async def test_notices_expire(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (one, other):
        await one.notices.publish(Lease, MODEL, ttl_s=0.5, role="leading")
        assert len(await other.notices.fetch(Lease, MODEL)) == 1
        await asyncio.sleep(0.5)
        assert other.notices.known_notices(Lease, MODEL) == []


def _notice_value(kind: type[Notice], folder: Path) -> bytes:
    stranger = Identity.ephemeral(folder)
    sealed = seal_statement(make_notice(kind, stranger, time.time()), stranger)
    return bytes(MSGPackSerializer.dumps(sealed))


def test_strangers_notices_neither_grow_nor_push_out_those_who_are_known(
    tmp_path: Path,
) -> None:
    known = {PeerId("old"): 500.0, PeerId("young"): 5.0}
    storage = BoundedStorage("own", Counter(), lambda peer: known.get(peer, 0.0))
    value, until = _notice_value(Lease, tmp_path), time.time() + 60
    assert storage.store_subkey(KEY, "young", value, until)
    for index in range(200):
        storage.store_subkey(KEY, f"stranger{index}", value, until)
    limit = Lease.bounds.max_per_key
    assert len(storage.data[KEY].value) == limit
    # Whoever is known gets in although it comes last, in place of a stranger.
    assert storage.store_subkey(KEY, "old", value, until)
    assert storage.store_subkey(KEY, "own", value, until)
    kept = storage.data[KEY].value.data
    assert {"old", "young", "own"} <= set(kept)
    assert len(kept) <= limit + 1
    assert storage._dropped["full"] == 200 - limit + 1


def test_strangers_who_come_first_do_not_keep_later_ones_out(tmp_path: Path) -> None:
    storage = BoundedStorage("own", Counter())
    value, until = _notice_value(PlacementNotice, tmp_path), time.time() + 60
    limit = PlacementNotice.bounds.max_per_key
    for index in range(limit):
        assert storage.store_subkey(KEY, f"first{index}", value, until)
    assert storage.store_subkey(KEY, "later", value, until)
    for index in range(500):
        storage.store_subkey(KEY, f"flood{index}", value, until)
    kept = storage.data[KEY].value.data
    assert len(kept) == limit
    # Nor does a flood push out those who were there before.
    assert {f"first{index}" for index in range(limit // 2)} <= set(kept)


@pytest.mark.parametrize("known_s", [0.0, 500.0])
def test_own_notice_is_not_displaced_from_a_full_key(tmp_path: Path, known_s: float) -> None:
    storage = BoundedStorage("own", Counter(), lambda peer: known_s * (peer != "own"))
    value, until = _notice_value(PlacementNotice, tmp_path), time.time() + 60
    for index in range(PlacementNotice.bounds.max_per_key):
        assert storage.store_subkey(KEY, f"first{index}", value, until)
    assert storage.store_subkey(KEY, "own", value, until)
    for index in range(500):
        storage.store_subkey(KEY, f"flood{index}", value, until)
    assert "own" in storage.data[KEY].value.data


def test_key_with_an_own_notice_is_not_dropped_for_a_signer_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_NOTICE_KEYS", 2)
    known = {PeerId("old"): 500.0}
    storage = BoundedStorage("own", Counter(), lambda peer: known.get(peer, 0.0))
    value, until = _notice_value(Lease, tmp_path), time.time() + 60
    assert storage.store_subkey(DHTID(1), "own", value, until)
    assert storage.store_subkey(DHTID(2), "stranger", value, until)
    assert storage.store_subkey(DHTID(3), "old", value, until)
    assert set(storage.data) == {DHTID(1), DHTID(3)}
    assert storage.store_subkey(DHTID(3), "own", value, until)
    known[PeerId("older")] = 900.0
    assert not storage.store_subkey(DHTID(4), "older", value, until)


async def test_reader_never_forgets_those_whom_its_operator_names(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (one,):
        board, limit = one.notices, PlacementNotice.bounds.max_per_key
        named = Identity.ephemeral(tmp_path)
        board.pin_signers([named.peer_id])
        now = time.time()
        for _ in range(limit):
            board._remember(make_notice(PlacementNotice, Identity.ephemeral(tmp_path), now))
        board._remember(make_notice(PlacementNotice, named, now))
        kept = [notice.signer for notice in board.known_notices(PlacementNotice, MODEL)]
        assert named.peer_id in kept
        assert len(kept) == limit


def test_notices_about_many_models_take_no_room_of_records_nor_of_known_signers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_NOTICE_KEYS", 20)
    monkeypatch.setattr(dht_storage, "MAX_MODEL_KEYS", 3)
    known = {PeerId("old"): 500.0}
    storage = BoundedStorage("own", Counter(), lambda peer: known.get(peer, 0.0))
    value, until = _notice_value(FailureReport, tmp_path), time.time() + 60
    stored = [storage.store_subkey(DHTID(100 + i), "stranger", value, until) for i in range(50)]
    assert sum(stored) == 20
    assert storage.store_subkey(DHTID(1), "old", value, until)
    assert len(storage.data) == 20
    assert [storage.store_subkey(DHTID(1000 + i), f"p{i}", b"r", until) for i in range(4)] == [
        True,
        True,
        True,
        False,
    ]


def test_bytes_of_notices_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "MAX_NOTICE_BYTES", 10 * FailureReport.bounds.max_bytes)
    storage = BoundedStorage("own", Counter())
    value, until = _notice_value(FailureReport, tmp_path), time.time() + 60
    stored = [storage.store_subkey(DHTID(i % 5), f"s{i}", value, until) for i in range(30)]
    assert sum(stored) == 10
    assert storage.store_subkey(DHTID(0), "s0", value, until + 1)


async def test_known_time_begins_with_the_first_record(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (one, other):
        peer = one.identity.peer_id
        assert other.notices.peer_ages.known_s(peer) == 0.0
        await one.directory.publish(make_status())
        await other.directory.fetch(MODEL)
        assert 0.0 <= other.notices.peer_ages.known_s(peer) < 5.0
