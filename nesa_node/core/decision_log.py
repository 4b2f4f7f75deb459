"""Log of routing, placement and tuning decisions with their reasons, for `nesa-node explain`.

A local SQLite file, since several programs may write at once. It is never sent anywhere.
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

MAX_KEPT_PER_KIND = 1000
"""Most decisions kept of each kind; the oldest are deleted."""
MIN_NAME_PREFIX_CHARS = 4
_LOCK_TIMEOUT_S = 2.0

DecisionKind = Literal["session", "placement", "tuning", "audit", "speculation"]
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
class LoggedDecision:
    """A logged decision. `name` is the session's or placement's (an audit's, or a speculation's, is
    its session's), `made_at` in Unix seconds.

    `body` is what JSON can hold.
    """

    kind: DecisionKind
    name: str
    made_at: float
    body: Mapping[str, Any]


class DecisionLog:
    """Bounded log of decisions. Each call opens and closes the database: writes are rare."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, decision: LoggedDecision) -> None:
        """Append a decision and delete the oldest beyond `MAX_KEPT_PER_KIND`. Raises `OSError`."""
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
                    (decision.kind, decision.kind, MAX_KEPT_PER_KIND),
                )
        except sqlite3.Error as error:
            raise OSError(f"cannot write {self._path}: {error}") from error

    def find(self, name: str) -> tuple[LoggedDecision, ...]:
        """Decisions of the one session or placement with a name that starts with `name`, in order.

        Raises `ConfigError` if no name or several names match.
        """
        if len(name) < MIN_NAME_PREFIX_CHARS:
            raise ConfigError(
                f"give at least {MIN_NAME_PREFIX_CHARS} characters of a session or placement"
            )
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

    def recent(self, count: int) -> tuple[LoggedDecision, ...]:
        """The last `count` decisions of all kinds, oldest first."""
        return self._select("order by number desc limit ?", count)[::-1]

    def _select(self, clause: str, *values: object) -> tuple[LoggedDecision, ...]:
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
        return tuple(
            LoggedDecision(kind, name, at, json.loads(body)) for kind, name, at, body in rows
        )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S)) as database:
            database.execute("pragma synchronous=off")
            database.execute(_TABLE)
            yield database
