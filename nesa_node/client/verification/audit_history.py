"""What a user's audits said of each node, kept on disk: passed and lost audits, and barred nodes.

What nodes cached behind a wrong one is wrong, too: prefixes get another salt then.

A local SQLite file, since several programs of a user may write at once. It is never sent anywhere.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.reputation import distrust_s

log = get_logger(__name__)

AuditOutcome = Literal[
    "passed", "failed", "unclear", "disputed", "outvoted", "uncalibrated", "not audited"
]
"""An "unclear" one found an error that may be another node's. "disputed": two neighbours say
otherwise of what passed between them. Most of the nodes that computed the same agree on something
else than one that is "outvoted"."""

NEWCOMER_RATE_FACTOR = 10.0
"""How many times as often newcomers are drawn."""
TRUSTED_AFTER_AUDITS = 3
"""Passed audits after which a node is no newcomer."""
MAX_PEERS = 10_000
"""Most nodes kept, by when they were last audited. Barred ones beyond them are forgotten, too:
identities are free, so that a list of them could grow for ever."""
_LOCK_TIMEOUT_S = 2.0
_TABLE = """
create table if not exists peers (
    peer text primary key,
    passed integer not null default 0,
    barred_for text not null default '',
    audited_at real not null,
    lost integer not null default 0
)
"""
_ADD_LOST_COLUMN = "alter table peers add column lost integer not null default 0"
"""To a file of an earlier version."""
_ADD = """
insert into peers (peer, passed, barred_for, audited_at) values (:peer, :passed, :reason, :now)
on conflict (peer) do update set audited_at = :now,
    passed = case when :passed = 0 then 0 else passed + :passed end,
    lost = case when :passed = 0 then lost else 0 end,
    barred_for = case when :reason = '' then barred_for else :reason end
"""
_ADD_LOST = """
insert into peers (peer, audited_at, lost) values (:peer, :now, 1)
on conflict (peer) do update set audited_at = :now, lost = lost + 1
"""
_CACHES_TABLE = """
create table if not exists caches (id integer primary key check (id = 1), disowned integer not null)
"""
_DISOWN = """
insert into caches (id, disowned) values (1, 1)
on conflict (id) do update set disowned = disowned + 1
"""
_FORGET = """
delete from peers where peer in (select peer from peers order by audited_at desc
    limit -1 offset :limit)
"""


class AuditHistory:
    """Passed and lost audits of nodes, and why nodes are barred. Changes are written at once.

    What cannot be read or written is logged and known to this process alone.
    """

    def __init__(self, path: Path | None) -> None:
        """`path=None` keeps nothing."""
        self._path = path
        self.passed: dict[PeerId, int] = {}
        """Passed audits by node."""
        self.lost: dict[PeerId, int] = {}
        """Audits by node that were drawn since the last passed one, and that the end of the node's
        connection prevented."""
        self.barred: dict[PeerId, str] = {}
        """Why nodes are not used, by node."""
        self.disowned = 0
        """How often prefix caches were disowned."""
        for peer, passed, reason, lost in self._read():
            self.passed[PeerId(peer)] = passed
            self.lost[PeerId(peer)] = lost
            if reason:
                self.barred[PeerId(peer)] = reason

    def draw_rate(self, peer: PeerId, rate: float) -> float:
        """Probability that a session's work at `peer` is audited, where `rate` is the usual one.

        Certain after a lost audit, until one passes.
        """
        if self.lost.get(peer):
            return 1.0 if rate > 0 else 0.0
        is_newcomer = self.passed.get(peer, 0) < TRUSTED_AFTER_AUDITS
        return min(rate * NEWCOMER_RATE_FACTOR, 1.0) if is_newcomer else rate

    def distrust_s(self, peer: PeerId) -> float:
        """Seconds per token that chains through `peer` pay for what its audits say."""
        return distrust_s(self.passed.get(peer, 0), self.lost.get(peer, 0))

    def record_passed(self, peer: PeerId) -> None:
        self.passed[peer] = self.passed.get(peer, 0) + 1
        self.lost[peer] = 0
        self._write(_ADD, peer, passed=1)

    def record_lost(self, peer: PeerId) -> None:
        """Record that the end of its connection prevented an audit of `peer`."""
        self.lost[peer] = self.lost.get(peer, 0) + 1
        self._write(_ADD_LOST, peer)

    def bar(self, peer: PeerId, reason: str) -> None:
        """Do not use `peer` any more, nor what is cached in nodes after it."""
        self.barred[peer] = reason
        self.disown_caches(peer)

    def disown_caches(self, peer: PeerId) -> None:
        """Reuse no prefix that is cached now. `peer`, whose cache was wrong, is a newcomer."""
        self.passed[peer] = 0
        self.disowned += 1
        self._write(_ADD, peer, reason=self.barred.get(peer, ""), disown=True)

    def derive_salt(self, salt: bytes) -> bytes:
        """`salt` for prefixes that have nothing in common with those that were disowned."""
        if not self.disowned:
            return salt
        number = self.disowned.to_bytes(8, "big")
        return hashlib.blake2b(number, key=salt, digest_size=len(salt)).digest()

    def _read(self) -> list[tuple[str, int, str, int]]:
        if self._path is None or not self._path.exists():
            return []
        try:
            with self._open(self._path) as database:
                for (disowned,) in database.execute("select disowned from caches"):
                    self.disowned = disowned
                return database.execute(
                    "select peer, passed, barred_for, lost from peers"
                ).fetchall()
        except sqlite3.Error as error:
            log.warning("audits_not_read", path=str(self._path), reason=str(error))
            return []

    def _write(
        self,
        statement: str,
        peer: PeerId,
        *,
        passed: int = 0,
        reason: str = "",
        disown: bool = False,
    ) -> None:
        if self._path is None:
            return
        values = {"peer": peer, "passed": passed, "reason": reason, "now": time.time()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._open(self._path) as database, database:
                database.execute(statement, values)
                if disown:
                    database.execute(_DISOWN)
                database.execute(_FORGET, {"limit": MAX_PEERS})
        except (OSError, sqlite3.Error) as error:
            log.warning("audit_not_kept", path=str(self._path), reason=str(error))

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S)) as database:
            database.execute(_TABLE)
            with suppress(sqlite3.OperationalError):  # it is there
                database.execute(_ADD_LOST_COLUMN)
            database.execute(_CACHES_TABLE)
            yield database
