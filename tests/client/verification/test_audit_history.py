"""What a user's audits said of nodes, on disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from nesa_node.client.verification import audit_history
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.ids import PeerId

PAIR = NODE, OTHER = PeerId("node"), PeerId("other")


def test_newcomers_are_drawn_ten_times_as_often(tmp_path: Path) -> None:
    history = AuditHistory(tmp_path / "audits.db")
    assert history.draw_rate(NODE, 0.01) == pytest.approx(0.1)
    assert history.draw_rate(NODE, 0.5) == 1.0
    for _ in range(3):
        history.record_passed(NODE)
    assert history.draw_rate(NODE, 0.01) == 0.01
    assert history.draw_rate(OTHER, 0.01) == pytest.approx(0.1)
    assert history.draw_rate(OTHER, 0.0) == 0.0


def test_after_a_lost_audit_each_session_is_drawn_until_one_passes(tmp_path: Path) -> None:
    path = tmp_path / "audits.db"
    history = AuditHistory(path)
    for _ in range(3):
        history.record_passed(NODE)
    history.record_lost(NODE)
    for known in (history, AuditHistory(path)):
        assert known.draw_rate(NODE, 0.01) == 1.0
        assert known.draw_rate(NODE, 0.0) == 0.0
        assert known.distrust_s(NODE) > known.distrust_s(OTHER)
    history.record_lost(OTHER)
    AuditHistory(path).record_passed(NODE)
    assert AuditHistory(path).draw_rate(NODE, 0.01) == 0.01
    assert AuditHistory(path).passed == {NODE: 4, OTHER: 0}
    # Caches are as good as they were.
    assert AuditHistory(path).disowned == 0


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "audits.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "create table peers (peer text primary key, passed integer not null default 0, "
            "barred_for text not null default '', audited_at real not null)"
        )
        database.execute("insert into peers values (?, 2, '', 1.0), (?, 0, 'it lied', 2.0)", PAIR)
    history = AuditHistory(path)
    assert (history.passed[NODE], history.barred) == (2, {OTHER: "it lied"})
    history.record_lost(NODE)
    assert AuditHistory(path).lost == {NODE: 1, OTHER: 0}


def test_another_process_of_the_user_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audits.db"
    first, second = AuditHistory(path), AuditHistory(path)
    for _ in range(2):
        first.record_passed(NODE)
    second.record_passed(NODE)
    second.bar(OTHER, "it lied")
    first.record_passed(OTHER)
    third = AuditHistory(path)
    assert third.draw_rate(NODE, 0.01) == 0.01
    assert third.barred == {OTHER: "it lied"}


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    history = AuditHistory(None)
    history.bar(NODE, "it lied")
    assert history.barred == {NODE: "it lied"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"no database", b""])
def test_a_damaged_file_does_not_end_sessions(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "audits.db"
    path.write_bytes(content)
    history = AuditHistory(path)
    history.bar(NODE, "it lied")
    assert NODE in history.barred


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_history, "MAX_PEERS", 5)
    history = AuditHistory(tmp_path / "audits.db")
    for number in range(20):
        history.bar(PeerId(f"node-{number}"), "it lied")
    kept = AuditHistory(tmp_path / "audits.db").barred
    assert sorted(kept) == sorted(f"node-{number}" for number in range(15, 20))
