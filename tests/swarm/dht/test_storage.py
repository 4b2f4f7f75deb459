from __future__ import annotations

import time
from collections import Counter

import pytest

from nesa_node.swarm.dht import storage as dht_storage
from nesa_node.swarm.dht.message_codec import MAX_RECORDS_PER_CALL, pack_records, unpack_records
from nesa_node.swarm.dht.storage import BoundedStorage
from nesa_node.swarm.p2p.hivemind_imports import DHTID, DHTLocalStorage

KEY = DHTID(7)
OWN = "own"


@pytest.fixture
def storage() -> BoundedStorage:
    return BoundedStorage(OWN, Counter())


def _subkeys(storage: BoundedStorage, key: DHTID = KEY) -> set[str]:
    item = storage.get(key)
    return set() if item is None else set(item.value.data)


def test_replayed_older_record_does_not_shorten_the_life_of_a_newer(
    storage: BoundedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does in hivemind's own storage, which is why ours exists."""
    now = time.time()
    theirs = DHTLocalStorage()
    for each in (storage, theirs):
        assert each.store_subkey(KEY, "p", b"new", now + 60)
        assert not each.store_subkey(KEY, "p", b"old", now + 20)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 30)
    assert _subkeys(storage) == {"p"}
    found = theirs.get(KEY)
    assert found is None or "p" not in found.value


def test_a_record_that_is_there_is_kept(storage: BoundedStorage) -> None:
    """A node that holds an adapter passes the author's notice on before the author stores it."""
    now = time.time()
    assert storage.store_subkey(KEY, "p", b"record", now + 60)
    assert storage.store_subkey(KEY, "p", b"record", now + 60)
    assert not storage.store_subkey(KEY, "p", b"another", now + 60)
    assert not storage.store_subkey(KEY, "p", b"record", now + 50)


def test_replays_take_no_memory(storage: BoundedStorage) -> None:
    now = time.time()
    for index in range(5000):
        storage.store_subkey(KEY, "p", b"x" * 100, now + 60)
        storage.store_subkey(KEY, "q", b"x" * 100, now + 60 + index * 0.001)
    records = storage.data[KEY].value
    assert len(records.expiration_heap) < 200
    assert len(storage.expiration_heap) < 200
    assert storage.total_bytes() == 200


def test_regular_value_cannot_erase_records(storage: BoundedStorage) -> None:
    now = time.time()
    storage.store_subkey(KEY, "p", b"record", now + 60)
    assert not storage.store(KEY, b"poison", now + 500)
    assert _subkeys(storage) == {"p"}


def test_full_key_keeps_its_members_and_refuses_newcomers(
    storage: BoundedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_BYTES_PER_KEY", 1000)
    now = time.time()
    accepted = [storage.store_subkey(KEY, f"p{i}", bytes(100), now + 60) for i in range(20)]
    assert accepted == [True] * 10 + [False] * 10
    assert storage.store_subkey(KEY, "p3", bytes(100), now + 61)
    assert storage.store_subkey(KEY, OWN, bytes(100), now + 61)
    assert len(_subkeys(storage)) == 11
    assert storage._dropped == {"full": 10}


def test_full_key_of_tiny_records_fits_into_one_answer(storage: BoundedStorage) -> None:
    now = time.time()
    assert storage.store_subkey(KEY, "first", bytes(355), now + 60)
    for index in range(MAX_RECORDS_PER_CALL + 10):
        storage.store_subkey(KEY, f"p{index}", bytes(355), now + 60)
    assert storage.store_subkey(KEY, OWN, bytes(355), now + 60)
    assert storage.store_subkey(KEY, "first", bytes(355), now + 61)
    records = unpack_records(pack_records(storage.records_of(KEY)))
    assert len(records) == dht_storage.MAX_RECORDS_PER_KEY + 1
    assert {"first", OWN} <= {subkey for subkey, _, _ in records}


def test_room_returns_when_records_expire(
    storage: BoundedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_BYTES_PER_KEY", 100)
    now = time.time()
    assert storage.store_subkey(KEY, "p", bytes(100), now + 60)
    assert not storage.store_subkey(KEY, "q", bytes(100), now + 200)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 61)
    assert not storage.store_subkey(KEY, "q", bytes(100), now + 200), "it was counted just now"
    monkeypatch.setattr(dht_storage, "_RECOUNT_INTERVAL_S", 0.0)
    assert storage.store_subkey(KEY, "q", bytes(100), now + 200)
    assert _subkeys(storage) == {"q"}


def test_number_of_keys_and_total_size_are_bounded(
    storage: BoundedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_MODEL_KEYS", 5)
    now = time.time()
    stored = [storage.store_subkey(DHTID(i), f"p{i}", bytes(100), now + 60) for i in range(8)]
    assert stored == [True] * 5 + [False] * 3
    monkeypatch.setattr(dht_storage, "MAX_BYTES", 600)
    assert storage.store_subkey(DHTID(0), "q", bytes(100), now + 60)
    assert not storage.store_subkey(DHTID(0), "r", bytes(100), now + 60)


def test_signer_has_a_record_under_one_model_and_in_the_index() -> None:
    """Else one identity could fill all keys."""
    storage = BoundedStorage(OWN, Counter(), index_key=KEY)
    now = time.time()
    for index in range(5):
        until = now + 60 + index
        assert storage.store_subkey(DHTID(100 + index), "p", bytes(100), until)
        assert storage.store_subkey(KEY, "p", bytes(100), until)
        assert set(storage.data) == {KEY, DHTID(100 + index)}
        assert not storage.store_subkey(DHTID(99), "p", bytes(100), until)
    assert storage._bytes.total() == storage.total_bytes() == 200
    assert storage.store_subkey(DHTID(104), "q", bytes(100), now + 60)
    assert storage.store_subkey(DHTID(105), "p", bytes(100), now + 65)
    assert _subkeys(storage, DHTID(104)) == {"q"}


def test_new_model_of_a_known_signer_takes_the_key_of_signers_known_for_less_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_MODEL_KEYS", 5)
    known = {"old": 500.0, "older": 600.0, "young": 5.0}
    storage = BoundedStorage(OWN, Counter(), lambda peer: known.get(peer, 0.0), KEY)
    until = time.time() + 60
    for index, signer in enumerate([OWN, "older", "young", "stranger", "young2"]):
        assert storage.store_subkey(DHTID(100 + index), signer, bytes(100), until)
    assert storage.store_subkey(DHTID(103), "older2", bytes(100), until)
    known |= {"older2": 700.0, "young2": 6.0}
    assert not storage.store_subkey(DHTID(200), "newcomer", bytes(100), until)
    assert storage.store_subkey(KEY, "newcomer", bytes(100), until), "the index does not count"
    assert storage.store_subkey(DHTID(200), "old", bytes(100), until)
    assert set(storage.data) == {KEY, *map(DHTID, (100, 101, 103, 104, 200))}


def test_merging_into_a_result_leaves_the_storage_alone(storage: BoundedStorage) -> None:
    now = time.time()
    storage.store_subkey(KEY, "p", b"record", now + 60)
    found = storage.get(KEY)
    assert found is not None
    found.value.store("q", b"foreign", now + 60)
    assert _subkeys(storage) == {"p"}


def _sharded_storage() -> BoundedStorage:
    """Keys from 1,000 are those of shards."""

    def is_shard(key: bytes, _value: bytes) -> bool:
        return int.from_bytes(key, "big") >= 1000

    return BoundedStorage(OWN, Counter(), index_key=KEY, is_shard_record=is_shard)


def test_signer_has_a_record_under_one_shard_beside_its_model() -> None:
    """Else one identity could fill all shards."""
    storage = _sharded_storage()
    now = time.time()
    assert storage.store_subkey(DHTID(100), "p", bytes(100), now + 60)
    for index in range(5):
        until = now + 60 + index
        assert storage.store_subkey(DHTID(1000 + index), "p", bytes(100), until)
        assert set(storage.data) == {DHTID(100), DHTID(1000 + index)}
        assert not storage.store_subkey(DHTID(999_999), "p", bytes(100), until)


def test_shards_neither_take_room_of_models_nor_lose_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dht_storage, "MAX_MODEL_KEYS", 3)
    monkeypatch.setattr(dht_storage, "MAX_SHARD_KEYS", 4)
    monkeypatch.setattr(dht_storage, "MAX_BYTES", 400)
    monkeypatch.setattr(dht_storage, "MAX_SHARD_BYTES", 500)
    storage = _sharded_storage()
    until = time.time() + 60

    def store(first: int) -> list[bool]:
        return [
            storage.store_subkey(DHTID(first + index), f"{first}-{index}", bytes(100), until)
            for index in range(6)
        ]

    assert store(1000) == [True] * 4 + [False] * 2
    assert store(100) == [True] * 3 + [False] * 3
    again = [storage.store_subkey(DHTID(1000), f"more{i}", bytes(100), until) for i in range(3)]
    assert again == [True, False, False]
    assert storage.store_subkey(DHTID(100), "more", bytes(100), until)
    assert not storage.store_subkey(DHTID(100), "yet more", bytes(100), until)
    assert storage.num_records(DHTID(1000)) == 2


def test_shard_is_as_hard_to_fill_as_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_storage, "MAX_RECORDS_PER_KEY", 10)
    storage = _sharded_storage()
    until = time.time() + 60
    stored = [storage.store_subkey(DHTID(1000), f"p{i}", bytes(10), until) for i in range(12)]
    assert stored == [True] * 10 + [False] * 2
