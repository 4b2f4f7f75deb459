"""The decisions that are kept on disk."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from nesa_node.core.decision_log import MAX_KEPT_PER_KIND, DecisionLog, LoggedDecision
from nesa_node.core.errors import ConfigError


def _session(name: str, at: float = 0.0) -> LoggedDecision:
    return LoggedDecision("session", name, at, {"chain": [name], "total_s": at})


def test_decisions_come_back_by_the_beginning_of_their_name(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "new" / "decisions.db")
    assert log.recent(5) == ()
    for decision in (_session("abcdef", 1.0), _session("abcxyz", 2.0), _session("abcdef", 3.0)):
        log.add(decision)
    assert log.find("abcd") == (_session("abcdef", 1.0), _session("abcdef", 3.0))
    assert [decision.made_at for decision in log.recent(2)] == [2.0, 3.0]
    with pytest.raises(ConfigError, match="no decision"):
        log.find("zzzz")
    with pytest.raises(ConfigError, match="at least 4"):
        log.find("abc")
    log.add(_session("abcd99"))
    with pytest.raises(ConfigError, match="abcd99, abcdef"):
        log.find("abcd")


def test_a_wildcard_is_a_character_like_others(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.db")
    log.add(_session("abcdef"))
    with pytest.raises(ConfigError, match="no decision"):
        log.find("abc%")


def test_only_the_last_of_each_kind_are_kept(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.db")
    log.add(LoggedDecision("placement", "first", 0.0, {}))
    for number in range(MAX_KEPT_PER_KIND + 5):
        log.add(_session(f"session-{number}"))
    kept = log.recent(10 * MAX_KEPT_PER_KIND)
    assert len(kept) <= MAX_KEPT_PER_KIND + 1
    assert kept[0].name == "first"
    assert kept[-1].name == f"session-{MAX_KEPT_PER_KIND + 4}"
    log.add(LoggedDecision("placement", "second", 0.0, {}))
    placements = [
        each.name for each in log.recent(10 * MAX_KEPT_PER_KIND) if each.kind == "placement"
    ]
    assert placements == ["first", "second"]


def _write(path: Path, process: int) -> None:
    for number in range(20):
        DecisionLog(path).add(_session(f"process-{process}-{number}"))


def test_programs_may_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "decisions.db"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(DecisionLog(path).recent(100)) == 60


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "decisions.db"
    path.write_bytes(b"not a database, though quite long enough to look like one" * 10)
    with pytest.raises(ConfigError, match=r"decisions\.db"):
        DecisionLog(path).recent(5)
    with pytest.raises(OSError, match=r"decisions\.db"):
        DecisionLog(path).add(_session("abcdef"))


def test_decisions_that_cannot_be_read_are_not_told_as_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"cannot read .*file/decisions.db: Not a directory"):
        DecisionLog(file / "decisions.db").recent(5)
