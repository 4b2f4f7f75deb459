"""The file of keys: what is in it, who may change it, and several programs at once."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.web import key_store as key_file
from nesa_node.web import key_store as keys
from nesa_node.web.authenticator import Authenticator
from nesa_node.web.key_store import KeyLimits, KeyStore


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "keys.json"


def test_a_key_is_random_and_kept_as_a_hash_for_its_owner_only(path: Path) -> None:
    store = KeyStore(path)
    made, key = store.add("alice")
    _, other = store.add("bob")
    assert key.startswith("nesa-")
    assert len(key) == len("nesa-") + 43
    assert key != other
    assert made.id == sha256(key.encode()).hexdigest()[:8]
    text = path.read_text(encoding="utf-8")
    assert key not in text
    assert key.removeprefix("nesa-") not in text
    assert sha256(key.encode()).hexdigest() in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_the_key_itself_finds_its_entry_and_no_other_text_does(path: Path) -> None:
    store = KeyStore(path)
    made, key = store.add("alice")
    assert store.find(key) == made
    for text in ("", key[:-1], key + "=", key.upper(), made.id, made.sha256, "\ud800", "ä" * 9999):
        assert store.find(text) is None
    assert store.find_by_id(made.id) == made
    assert store.find_by_id("alice") is None


def test_half_of_a_hash_is_not_enough(path: Path) -> None:
    store = KeyStore(path)
    made, key = store.add("alice")
    document = json.loads(path.read_text(encoding="utf-8"))
    document["keys"][0]["sha256"] = made.sha256[:32] + "0" * 32
    path.write_text(json.dumps(document), encoding="utf-8")
    assert KeyStore(path).find(key) is None


def test_names_are_given_once_and_the_file_is_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(path)
    store.add("alice")
    with pytest.raises(ConfigError, match="'alice'"):
        store.add("alice")
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    store.add("bob")
    with pytest.raises(ConfigError, match="revoke some"):
        store.add("carol")
    assert [key.name for key in store.read_all()] == ["alice", "bob"]


@pytest.mark.parametrize("by", ["id", "name", "key"])
def test_a_key_is_revoked_by_id_by_name_or_by_itself(path: Path, by: str) -> None:
    store = KeyStore(path)
    made, key = store.add("alice")
    store.add("bob")
    assert store.revoke({"id": made.id, "name": "alice", "key": key}[by]) == made
    assert store.find(key) is None
    assert [left.name for left in store.read_all()] == ["bob"]
    with pytest.raises(ConfigError, match="nesa-node keys list"):
        store.revoke("alice")


def test_a_key_ends_at_its_time(path: Path) -> None:
    clock = Clock()
    store = KeyStore(path, clock)
    made, key = store.add("alice", expires_at=clock.now + 60)
    clock.now += 59
    assert store.find(key) == made
    clock.now += 1
    assert store.find(key) is None
    assert store.find_by_id(made.id) is None
    assert store.read_all() == (made,)


def test_limits_are_kept(path: Path) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3)
    _, key = KeyStore(path).add("alice", limits)
    found = KeyStore(path).find(key)
    assert found is not None
    assert found.requests_per_minute == 1
    assert found.tokens_per_minute == 2
    assert found.concurrent_requests == 3


def test_no_file_is_no_keys_and_reading_makes_none(path: Path) -> None:
    store = KeyStore(path)
    assert store.read_all() == ()
    assert store.find("nesa-x") is None
    assert not store.has_had_keys
    assert not path.parent.exists()


def test_a_file_without_keys_left_still_exists(path: Path) -> None:
    store = KeyStore(path)
    store.add("alice")
    store.revoke("alice")
    assert store.has_had_keys
    assert store.read_all() == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": "nesa-node keys", "version": 2, "keys": []}',
        '{"format": "nesa-node keys", "version": 1, "keys": [{}]}',
        '{"format": "nesa-node keys", "version": 1, "keys": [], "more": 1}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_a_damaged_file_is_said_and_never_overwritten(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    store = KeyStore(path)
    for do in (store.read_all, lambda: store.find("nesa-x"), lambda: store.add("alice")):
        with pytest.raises(ConfigError, match=r"keys\.json is damaged"):
            do()
    assert path.read_text(encoding="utf-8") == content


def test_a_file_that_others_can_write_or_that_is_none_is_refused(path: Path) -> None:
    store = KeyStore(path)
    store.add("alice")
    path.chmod(0o602)
    with pytest.raises(ConfigError, match="written by other users"):
        store.read_all()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        store.read_all()
    path.unlink()
    path.mkdir()
    for do in (store.read_all, lambda: store.find("nesa-x"), lambda: store.add("alice")):
        with pytest.raises(ConfigError, match=r"cannot read the keys in .*: Is a directory"):
            do()


def test_a_file_of_a_group_is_read(path: Path) -> None:
    """A volume that a cluster mounts for a group looks so."""
    _, key = KeyStore(path).add("alice")
    path.chmod(0o660)
    assert KeyStore(path).find(key) is not None


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    KeyStore(real).add("alice")
    path.parent.mkdir()
    path.symlink_to(real)
    _, key = KeyStore(path).add("bob")
    assert path.is_symlink()
    assert KeyStore(real).find(key) is not None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot write the keys"):
        KeyStore(tmp_path / "file" / "keys.json").add("alice")


def test_whoever_cannot_get_the_lock_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "_LOCK_TIMEOUT_S", 0.05)
    file = key_file.KeyFile(path)
    with file.edit_keys(), pytest.raises(ConfigError, match=r"keeps .* locked"):
        KeyStore(path).add("alice")
    KeyStore(path).add("alice")


def test_a_lock_that_is_waited_for_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, waits, told = key_file.KeyFile(path), WaitTracker(), []

    def sleep(_seconds: float) -> None:
        told.append(waits.slow_wait(0))
        holder.close()

    monkeypatch.setattr(time, "sleep", sleep)
    with ExitStack() as holder:
        holder.enter_context(file.edit_keys())
        with waits.activate():
            KeyStore(path).add("alice")
    (wait,) = told
    assert wait is not None
    assert wait.text(wait.since).startswith("waiting for another program that changes the keys: ")
    assert waits.slow_wait(0) is None


def test_a_writer_that_fails_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(path)
    store.add("alice")
    before = path.read_bytes()

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        store.add("bob")
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_use_is_coarse_and_survives_what_others_write(path: Path) -> None:
    clock = Clock()
    store = KeyStore(path, clock)
    _, key = store.add("alice")

    def use() -> bool:
        found = store.find(key)
        assert found is not None
        store.record_use(found)
        return store.has_unsaved_uses

    assert use()
    KeyStore(path, clock).add("bob")
    store.save_uses()
    assert [found.used_at for found in KeyStore(path).read_all()] == [clock.now, None]
    clock.now += keys.USE_SAVE_INTERVAL_S - 1
    assert not use()
    clock.now += 1
    assert use()
    KeyStore(path).revoke("alice")
    store.save_uses()
    assert [found.name for found in KeyStore(path).read_all()] == ["bob"]


def test_use_that_cannot_be_saved_harms_nobody(path: Path) -> None:
    store = KeyStore(path)
    made, _ = store.add("alice")
    store.record_use(made)
    path.write_bytes(b"{")
    store.save_uses()
    assert not store.has_unsaved_uses
    assert path.read_bytes() == b"{"


async def test_each_of_many_quick_changes_is_seen(path: Path) -> None:
    """Also where two files have the same size, inode and moment of change."""
    reader = KeyStore(path)
    for _ in range(3):
        writer = KeyStore(path)
        _, key = writer.add("alice")
        await asyncio.sleep(keys.RELOAD_INTERVAL_S)
        assert reader.find(key) is not None
        writer.revoke("alice")
        _, other = writer.add("alice")
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns))
        await asyncio.sleep(keys.RELOAD_INTERVAL_S)
        assert reader.find(key) is None
        assert reader.find(other) is not None
        writer.revoke("alice")


def test_reading_costs_one_look_per_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(path)
    _, key = store.add("alice")
    past = time.time() - 60
    os.utime(path, (past, past))
    assert store.find(key) is not None
    looks = 0
    real = key_file.KeyFile.read_stamp

    def counted(file: key_file.KeyFile) -> key_file.FileStamp:
        nonlocal looks
        looks += 1
        return real(file)

    monkeypatch.setattr(key_file.KeyFile, "read_stamp", counted)
    for _ in range(1000):
        store.find(key)
    assert looks <= 1


_WRITER = """
import sys
from pathlib import Path
from nesa_node.web.key_store import KeyStore
store = KeyStore(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    made, key = store.add(f"{sys.argv[2]}-{number}")
    assert store.find(key) == made
    if number % 2:
        store.revoke(made.id)
    else:
        print(key)
"""


def test_programs_that_write_at_once_lose_nothing(path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), name, "12"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    made = [key for writer in writers for key in writer.communicate(timeout=50)[0].split()]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    store = KeyStore(path)
    assert len(made) == 18
    assert all(store.find(key) is not None for key in made)
    assert len(store.read_all()) == 18


def test_a_file_that_may_be_there_counts_as_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    hidden = tmp_path / "file" / "keys.json"
    with pytest.raises(ConfigError, match="cannot read the keys"):
        _ = KeyStore(hidden).has_had_keys
    doorman = Authenticator(AccessConfig(keys_path=hidden))
    assert not doorman.is_open
    with pytest.raises(ConfigError, match="cannot read the keys"):
        doorman.check_exposure(HttpAddress("127.0.0.1", 0))
