"""Why something was decided: the last decisions of this user's programs, kept on this machine.

SQLite, since several programs may write at once. Nothing in it leaves the machine.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nesa_node.core.errors import ConfigError

KEPT = 1000
"""Of each kind."""
MIN_PREFIX = 4
_WAIT_S = 2.0

Kind = Literal["session", "placement", "tuning"]
_TABLE = """
create table if not exists decisions (
    number integer primary key autoincrement,
    kind text not null,
    name text not null,
    made_at real not null,
    body text not null
)
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """`name`: of the session or placement. `made_at`: seconds since the epoch. `body`: JSON."""

    kind: Kind
    name: str
    made_at: float
    body: Mapping[str, Any]


class DecisionLog:
    """Each call opens the file anew: programs write rarely, and end whenever they like."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, decision: Decision) -> None:
        """Keep it and drop the oldest beyond `KEPT`. Raises `OSError`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._open() as database, database:
                database.execute(
                    "insert into decisions (kind, name, made_at, body) values (?, ?, ?, ?)",
                    (decision.kind, decision.name, decision.made_at, json.dumps(decision.body)),
                )
                database.execute(
                    "delete from decisions where kind = ? and number <= (select number from "
                    "decisions where kind = ? order by number desc limit 1 offset ?)",
                    (decision.kind, decision.kind, KEPT),
                )
        except sqlite3.Error as error:
            raise OSError(f"cannot write {self._path}: {error}") from error

    def find(self, name: str) -> tuple[Decision, ...]:
        """The decisions of the one session or placement whose name begins with `name`, in order.

        Raises `ConfigError` if there is none, or more than one such.
        """
        if len(name) < MIN_PREFIX:
            raise ConfigError(f"give at least {MIN_PREFIX} characters of a session or placement")
        found = self._select("where substr(name, 1, ?) = ?", len(name), name)
        names = sorted({decision.name for decision in found})
        if not names:
            raise ConfigError(
                f"no decision about {name!r} is kept in {self._path}; `nesa-node explain` lists "
                "those that are"
            )
        if len(names) > 1:
            raise ConfigError(f"{name!r} could be {', '.join(names[:5])}: give more of it")
        return found

    def recent(self, count: int) -> tuple[Decision, ...]:
        """The last `count` of all kinds, in order."""
        return self._select("order by number desc limit ?", count)[::-1]

    def _select(self, clause: str, *values: object) -> tuple[Decision, ...]:
        try:
            self._path.stat()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        query = f"select kind, name, made_at, body from decisions {clause}"
        try:
            with self._open() as database:
                rows = database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"cannot read {self._path}: {error}; delete it") from error
        return tuple(Decision(kind, name, at, json.loads(body)) for kind, name, at, body in rows)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as database:
            database.execute("pragma synchronous=off")
            database.execute(_TABLE)
            yield database
