from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import AdapterError, DiskLimitError
from nesa_node.core.ids import ModelId
from nesa_node.server.adapters import store as adapter_store
from nesa_node.server.adapters.store import AdapterStore
from nesa_node.swarm.dht.adapter_notices import AdapterNotice
from nesa_node.swarm.p2p.identity import Identity
from tests.server.adapters.nodes import MODEL
from tests.swarm.notice_fields import listed_adapter, make_notice


def digest_of(number: int) -> str:
    return hashlib.sha256(bytes([number])).hexdigest()


def add(store: AdapterStore, number: int, nbytes: int = 100) -> str:
    digest = digest_of(number)
    with store.incoming() as folder:
        (folder / "adapter_config.json").write_bytes(b"{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes(nbytes - 2))
        store.add(folder, digest)
    return digest


def notice_of(
    identity: Identity, *digests: str, now: float | None = None, **changes: Any
) -> AdapterNotice:
    adapters = tuple(
        listed_adapter(name=f"name-{number}", digest=digest)
        for number, digest in enumerate(digests)
    )
    notice = make_notice(AdapterNotice, identity, now or time.time(), adapters=adapters, **changes)
    assert isinstance(notice, AdapterNotice)
    return notice


def set_age(store: AdapterStore, digest: str, seconds: float) -> None:
    """Make an adapter that came `seconds` ago."""
    at = time.time() - seconds
    os.utime(store.open(digest) / "adapter_config.json", (at, at))


def test_the_least_recently_used_adapter_is_evicted(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 250)
    one, two = add(store, 1), add(store, 2)
    past = time.time() - 50
    os.utime(tmp_path / one, (past, past))
    os.utime(tmp_path / two, (past + 1, past + 1))
    assert list(store.held()) == [one, two]
    assert store.open(one) == tmp_path / one
    three = add(store, 3)
    assert set(store.held()) == {one, three}
    with pytest.raises(AdapterError, match="is not on this machine"):
        store.open(two)
    assert sum(store.held().values()) <= store.max_bytes


def test_an_author_evicts_its_own_beyond_its_share(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1000)
    foreign, *own = (add(store, number) for number in range(3))
    past = time.time() - 50
    for number, digest in enumerate((foreign, *own)):
        os.utime(tmp_path / digest, (past + number, past + number))
    with store.incoming() as folder:
        (folder / "adapter_config.json").write_bytes(bytes(100))
        store.add(folder, digest_of(9), own)
    assert set(store.held()) == {foreign, own[1], digest_of(9)}


def test_an_adapter_larger_than_the_store_evicts_nothing(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 250)
    one = add(store, 1)
    with pytest.raises(DiskLimitError, match="adapter-store-gib"):
        add(store, 2, nbytes=251)
    assert list(store.held()) == [one]
    assert not list(tmp_path.glob("incoming-*"))


def test_the_number_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "MAX_HELD_ADAPTERS", 3)
    store = AdapterStore(tmp_path, 10_000)
    for number in range(5):
        add(store, number)
    assert len(store.held()) == 3


@pytest.mark.parametrize(
    "digest", ["..", "../..", "notices", "incoming-x", "", "a" * 63, "A" * 64, "a" * 64 + "\n"]
)
def test_nothing_but_a_digest_names_a_folder(tmp_path: Path, digest: str) -> None:
    store = AdapterStore(tmp_path, 1000)
    (tmp_path / "notices").mkdir()
    (tmp_path / "incoming-x").mkdir()
    assert not store.holds(digest)
    with pytest.raises(AdapterError):
        store.open(digest)


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, other = AdapterStore(tmp_path, 250), AdapterStore(tmp_path, 250)
    digest = add(one, 1)
    assert other.holds(digest)
    assert add(other, 1) == digest
    assert one.held() == other.held() == {digest: 100}


def test_what_no_notice_lists_is_deleted_after_a_while(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    store = AdapterStore(tmp_path / "store", 1000)
    listed, unlisted, young = (add(store, number) for number in range(3))
    store.keep_notice(notice_of(author, listed), b"sealed")
    for digest in (listed, unlisted):
        set_age(store, digest, 3600)
    stale = tmp_path / "store" / "incoming-killed"
    stale.mkdir()
    os.utime(stale, (0, 0))
    assert store.sweep() == [unlisted]
    assert set(store.held()) == {listed, young}
    assert not stale.exists()


def test_newer_notice_replaces_the_older_one_never_the_reverse(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    store = AdapterStore(tmp_path / "store", 1000)
    digest = add(store, 1)
    set_age(store, digest, 3600)
    store.keep_notice(notice_of(author, seq=2), b"removed")
    store.keep_notice(notice_of(author, digest, seq=1), b"replayed")
    (kept,) = store.notices(MODEL)
    assert (kept.sealed, kept.digests) == (b"removed", ())
    assert store.notices(ModelId("other@0")) == []
    assert store.sweep() == [digest]


def test_expired_and_damaged_notices_are_deleted(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    store = AdapterStore(tmp_path / "store", 1000)
    digest = add(store, 1)
    set_age(store, digest, 3600)
    store.keep_notice(notice_of(author, digest, now=time.time() - 61), b"old")
    (tmp_path / "store" / "notices" / "damaged.bin").write_bytes(b"\xff" * 10)
    assert store.notices() == []
    assert store.sweep() == [digest]
    assert not list((tmp_path / "store" / "notices").iterdir())


def test_notices_about_nothing_held_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "MAX_KEPT_NOTICES", 2)
    store = AdapterStore(tmp_path / "store", 1000)
    authors = [Identity.ephemeral(tmp_path) for _ in range(4)]
    digests = [add(store, number) for number in range(3)]
    store.keep_notice(notice_of(authors[0], digests[0]), b"0")
    store.keep_notice(notice_of(authors[1]), b"1")
    store.keep_notice(notice_of(authors[2], digests[1]), b"2")
    assert {each.sealed for each in store.notices()} == {b"0", b"2"}
    with pytest.raises(DiskLimitError):
        store.keep_notice(notice_of(authors[3], digests[2]), b"3")
    store.keep_notice(notice_of(authors[0], digests[0], seq=9), b"newer")
    assert {each.sealed for each in store.notices()} == {b"newer", b"2"}
