"""Store of snapshots over time, one SQLite file per model: for replay, and to continue after a
restart.

A snapshot is kept if it differs from the last one kept, or after ten minutes. The triggers' values
of every snapshot are kept as *looks* of a few hundred bytes. *Presence* is which nodes were
here, once in ten minutes of two weeks, in eight bytes per node. All are bounded; the oldest are
deleted first.

T slots of ten minutes, the last one now; N nodes.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Bools
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId
from nesa_node.topology.changes.triggers import HistoryEntry
from nesa_node.topology.forecast import PAST_SLOTS, slot_of
from nesa_node.topology.snapshot import Snapshot, snapshots_differ
from nesa_node.topology.snapshot_json import (
    MAX_SNAPSHOT_BYTES,
    snapshot_from_json,
    snapshot_to_json,
)

MAX_SNAPSHOTS = 5_000
MAX_STORED_BYTES = 1 << 28
MAX_LOOKS = 10_000
MAX_GAP_S = 600.0
"""Longest time between two kept snapshots, even without changes."""
_MAX_LOOK_BYTES = 1 << 16
_MAX_PRESENT = 4096
"""Nodes of one slot of presence; no orchestrator reads as many records of a model."""
_KEY_BYTES = 8
_SQLITE_MAGIC = b"SQLite format 3\0"
_LOCK_TIMEOUT_S = 2.0
_TABLES = """
create table if not exists snapshots (
    number integer primary key autoincrement,
    taken_at real not null,
    digest text not null unique,
    nbytes integer not null,
    body blob not null
);
create table if not exists looks (
    number integer primary key autoincrement,
    at real not null,
    body blob not null
);
create table if not exists presence (
    slot integer primary key,
    peers blob not null
);
"""


class SnapshotStore:
    """Opens the file anew for each call; other programs may read it meanwhile. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        max_snapshots: int = MAX_SNAPSHOTS,
        max_bytes: int = MAX_STORED_BYTES,
        max_looks: int = MAX_LOOKS,
        max_gap_s: float = MAX_GAP_S,
    ) -> None:
        self.path = path
        self._max_snapshots = max_snapshots
        self._max_bytes = max_bytes
        self._max_looks = max_looks
        self._max_gap_s = max_gap_s
        self._last: Snapshot | None = None

    def add(self, look: HistoryEntry, snapshot: Snapshot, *, always: bool = False) -> bool:
        """Store the look, and the snapshot if it is new or `always` is set.

        Returns whether the snapshot was stored. One larger than the bound never is, nor one without
        nodes, from which nothing could be planned. Raises `OSError` if the file cannot be written.
        """
        wanted = bool(snapshot.nodes) and (always or self._is_new(snapshot))
        body = snapshot_to_json(snapshot) if wanted else b""
        keep = 0 < len(body) <= min(self._max_bytes, MAX_SNAPSHOT_BYTES)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database, database:
                self._write_look(database, look)
                self._write_presence(database, snapshot)
                if keep:
                    self._write_snapshot(database, snapshot, body)
        except sqlite3.Error as error:
            raise OSError(f"cannot write {self.path}: {error}; delete it") from error
        if keep:
            self._last = snapshot
        return keep

    def snapshots(self, last: int | None = None) -> list[Snapshot]:
        """The `last` snapshots, or all, oldest first. Raises `ConfigError` as `read_snapshots`."""
        return read_snapshots(self.path, last) if self.path.exists() else []

    def looks(self, last: int) -> list[HistoryEntry]:
        """The `last` looks, oldest first. Raises `ConfigError` if they cannot be read."""
        if not self.path.exists():
            return []
        query = (
            "select body from looks where length(body) <= ? order by number desc limit ?",
            (_MAX_LOOK_BYTES, last),
        )
        with _open_read_only(self.path) as database:
            rows = database.execute(*query).fetchall()
        try:
            return [msgspec.json.decode(body, type=HistoryEntry) for (body,) in reversed(rows)]
        except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.path} holds a look that cannot be read: {error}; delete the file"
            ) from error

    def presence(self, peers: Sequence[PeerId], now_s: float) -> tuple[Bools, Bools]:
        """Whether each of `peers` was here, [T, N], and whether there was a look, [T], in the past
        two weeks' slots. In the last one, which is now, all are here. Raises `ConfigError` for what
        cannot be read."""
        now = slot_of(now_s)
        here_TN = np.zeros((PAST_SLOTS + 1, len(peers)), dtype=np.bool_)
        seen_T = np.zeros(PAST_SLOTS + 1, dtype=np.bool_)
        here_TN[-1] = seen_T[-1] = True
        if not self.path.exists():
            return here_TN, seen_T
        keys_N = _peer_keys(peers)
        with _open_read_only(self.path) as database:
            if not database.execute(
                "select 1 from sqlite_master where name = 'presence' and type = 'table'"
            ).fetchall():
                return here_TN, seen_T  # a store of an earlier version
            rows = database.execute(
                "select slot, peers from presence where slot >= ? and slot < ? "
                "and typeof(peers) = 'blob' and length(peers) <= ? and length(peers) % ? = 0",
                (now - PAST_SLOTS, now, _MAX_PRESENT * _KEY_BYTES, _KEY_BYTES),
            )
            for slot, blob in rows:
                row = int(slot) - now + PAST_SLOTS
                seen_T[row] = True
                here_TN[row] = np.isin(keys_N, np.frombuffer(blob, dtype="<u8"))
        return here_TN, seen_T

    def _is_new(self, snapshot: Snapshot) -> bool:
        last = self._last
        if last is None or abs(snapshot.taken_at - last.taken_at) >= self._max_gap_s:
            return True
        return snapshots_differ(last, snapshot)

    def _write_look(self, database: sqlite3.Connection, look: HistoryEntry) -> None:
        body = msgspec.json.encode(look)
        database.execute("insert into looks (at, body) values (?, ?)", (look.at, body))
        database.execute(
            "delete from looks where number <= (select max(number) from looks) - ?",
            (self._max_looks,),
        )

    def _write_presence(self, database: sqlite3.Connection, snapshot: Snapshot) -> None:
        """Write which nodes are here, at the first look of a slot that sees any."""
        here = [node.peer_id for node in (*snapshot.nodes, *snapshot.joining)][:_MAX_PRESENT]
        if not here:
            return
        database.execute(
            "insert or ignore into presence (slot, peers) values (?, ?)",
            (slot_of(snapshot.taken_at), _peer_keys(here).tobytes()),
        )
        database.execute(
            "delete from presence where slot <= "
            "(select slot from presence order by slot desc limit 1 offset ?)",
            (PAST_SLOTS,),
        )

    def _write_snapshot(
        self, database: sqlite3.Connection, snapshot: Snapshot, body: bytes
    ) -> None:
        database.execute(
            "insert or ignore into snapshots (taken_at, digest, nbytes, body) values (?, ?, ?, ?)",
            (snapshot.taken_at, snapshot.digest(), len(body), body),
        )
        sizes = database.execute("select number, nbytes from snapshots order by number desc")
        total = 0
        for count, (number, nbytes) in enumerate(sizes.fetchall(), 1):
            total += nbytes
            if count > self._max_snapshots or total > self._max_bytes:
                database.execute("delete from snapshots where number <= ?", (number,))
                break

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_LOCK_TIMEOUT_S)) as database:
            database.executescript(_TABLES)
            yield database


def _peer_keys(peers: Sequence[PeerId]) -> NDArray[np.uint64]:
    """The first eight bytes of the SHA-256 of each id, [N]."""
    digests = b"".join(hashlib.sha256(peer.encode()).digest()[:_KEY_BYTES] for peer in peers)
    return np.frombuffer(digests, dtype="<u8")


def snapshots_path(folder: Path, model_id: str) -> Path:
    """Path of a model's store; the id may contain any characters."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.@") else "_" for c in model_id)
    return folder / f"{safe[:120]}.db"


def is_snapshot_store(path: Path) -> bool:
    """Whether the file is an SQLite database. Raises `OSError` if it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC


def read_snapshots(path: Path, last: int | None = None) -> list[Snapshot]:
    """The `last` snapshots of a store, or all, by the time they were taken.

    The file may come from any source: sizes are checked before anything is read, and every snapshot
    against its digest. Raises `ConfigError` for what cannot be read.
    """
    with _open_read_only(path) as database:
        sizes = database.execute(
            "select number, length(body) from snapshots order by number desc limit ?",
            (MAX_SNAPSHOTS if last is None else min(last, MAX_SNAPSHOTS),),
        ).fetchall()
        if sum(size or 0 for _, size in sizes) > MAX_SNAPSHOT_BYTES:
            raise ConfigError(f"{path} has more than {MAX_SNAPSHOT_BYTES} bytes of snapshots")
        found = [_read_row(database, path, number) for number, _ in sizes]
    return sorted(found, key=lambda snapshot: snapshot.taken_at)


def _read_row(database: sqlite3.Connection, path: Path, number: int) -> Snapshot:
    where = f"{path}, snapshot {number}"
    body, digest = database.execute(
        "select body, digest from snapshots where number = ?", (number,)
    ).fetchone()
    if not isinstance(body, bytes):
        raise ConfigError(f"{where} is not a snapshot")
    snapshot = snapshot_from_json(body, where=where)
    if snapshot.digest() != digest:
        raise ConfigError(f"{where} does not match its digest: the file is damaged; delete it")
    return snapshot


@contextmanager
def _open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file read-only, if it has a store's tables (and not views of these names)."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCK_TIMEOUT_S)) as database:
            database.execute("pragma trusted_schema = off")
            kinds = database.execute(
                "select name, type from sqlite_master where name in ('snapshots', 'looks')"
            ).fetchall()
            if sorted(kinds) != [("looks", "table"), ("snapshots", "table")]:
                raise ConfigError(f"{path} is not a snapshot store")
            yield database
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {path}: {error}; delete it") from error
