"""Snapshots that outlive the daemon, and what is done about files that are not what they seem."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nesa_node.cli.app import run_command
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.server.orchestrator.history import History
from nesa_node.server.orchestrator.planner import Rebalancer
from nesa_node.server.orchestrator.snapshot_store import (
    SnapshotStore,
    is_snapshot_store,
    read_snapshots,
    snapshots_path,
)
from nesa_node.topology.changes.triggers import HistoryEntry
from nesa_node.topology.forecast import PAST_SLOTS, slot_of
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import Snapshot


def world(at: float = 0.0, *, nodes: int = 8) -> Snapshot:
    made = make_world(nodes, 10, np.random.default_rng(1)).snapshot
    return replace(made, taken_at=1e9 + at)


def look(snapshot: Snapshot) -> HistoryEntry:
    return HistoryEntry(at=snapshot.taken_at, digest=snapshot.digest(), nodes=len(snapshot.nodes))


def slower(snapshot: Snapshot, factor: float, *, only: int | None = None) -> Snapshot:
    """All round trips, or those of one node."""
    links = snapshot.links
    assert links is not None
    rtt_ms_NN = np.array(links.rtt_ms_NN)
    if only is None:
        rtt_ms_NN *= factor
    else:
        rtt_ms_NN[only] *= factor
        rtt_ms_NN[:, only] *= factor
    rest = (links.rate_bytes_per_s_NN, links.age_s_NN, links.confidence_NN)
    return replace(snapshot, links=Links(links.peers, rtt_ms_NN, *rest))


def faster(snapshot: Snapshot, factor: float) -> Snapshot:
    """Its first node, which holds what `test_only_what_says_something_new_is_kept` gives it."""
    first = snapshot.nodes[0]
    speed = factor * first.decode_tokens_per_s
    node = replace(first, span=Span(0, 1), decode_tokens_per_s=speed)
    return replace(snapshot, nodes=(node, *snapshot.nodes[1:]))


def test_what_was_kept_comes_back_exactly(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "new" / "model.db")
    assert store.snapshots() == []
    assert store.looks(5) == []
    first, second = world(0), slower(world(1), 2.0)
    assert store.add(look(first), first)
    assert store.add(look(second), second)
    found = SnapshotStore(store.path).snapshots()
    assert [each.digest() for each in found] == [first.digest(), second.digest()]
    assert [each.digest() for each in store.snapshots(1)] == [second.digest()]
    assert store.looks(1) == [look(second)]
    assert is_snapshot_store(store.path)


def test_only_what_says_something_new_is_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "model.db", max_gap_s=600)
    first = world(0)
    moved = replace(first.nodes[0], span=Span(0, 1))
    for snapshot, kept in (
        (first, True),
        (replace(world(1), nodes=(replace(first.nodes[0], load=0.9), *first.nodes[1:])), False),
        (slower(world(2), 1.01), False),
        (slower(world(3), 1.2), True),
        (replace(world(4), nodes=first.nodes[1:]), True),
        (replace(world(5), nodes=(moved, *first.nodes[1:])), True),
        (replace(world(6), nodes=(moved, *first.nodes[1:])), False),
        (replace(world(605), nodes=(moved, *first.nodes[1:])), True),
        (replace(world(606), nodes=()), False),
        (faster(world(607), 1.1), False),
        (faster(world(608), 1.3), True),
        (faster(world(609), 1.3), False),
    ):
        assert store.add(look(snapshot), snapshot) is kept, snapshot.taken_at
    assert len(store.looks(100)) == 12
    assert store.add(look(world(610)), world(610), always=True)


def test_the_oldest_go_when_there_are_too_many_or_they_are_too_large(tmp_path: Path) -> None:
    by_count = SnapshotStore(tmp_path / "count.db", max_snapshots=3, max_looks=4)
    for at in range(10):
        by_count.add(look(world(at)), world(at), always=True)
    assert [each.taken_at - 1e9 for each in by_count.snapshots()] == [7, 8, 9]
    assert [each.at - 1e9 for each in by_count.looks(100)] == [6, 7, 8, 9]
    by_size = SnapshotStore(tmp_path / "size.db", max_bytes=20_000)
    for at in range(10):
        by_size.add(look(world(at)), world(at), always=True)
    kept = by_size.snapshots()
    assert 1 <= len(kept) < 10
    assert kept[-1].taken_at == world(9).taken_at
    large = world(11, nodes=60)
    assert not by_size.add(look(large), large)


def _broken(path: Path, *statements: str) -> Path:
    store = SnapshotStore(path)
    store.add(look(world()), world())
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    return path


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["update snapshots set body = 'x'"], "not a snapshot"),
        (["update snapshots set body = cast('x' as blob)"], "cannot be read"),
        (["update snapshots set body = zeroblob(100000000)"], "cannot be read"),
        (["update snapshots set digest = 'other'"], "damaged"),
        (["drop table snapshots"], "not a snapshot store"),
        (
            ["drop table snapshots", "create view snapshots as select * from looks"],
            "not a snapshot store",
        ),
    ],
)
def test_a_damaged_or_hostile_store_is_told(
    statements: list[str], words: str, tmp_path: Path
) -> None:
    path = _broken(tmp_path / "model.db", *statements)
    with pytest.raises(ConfigError, match=words) as told:
        read_snapshots(path)
    assert "model.db" in str(told.value)


def test_a_file_that_is_cut_or_no_database_is_told(tmp_path: Path) -> None:
    path = _broken(tmp_path / "model.db")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"model\.db"):
        read_snapshots(path)
    path.write_bytes(b"not a database, though quite long enough to look like one" * 10)
    assert not is_snapshot_store(path)
    with pytest.raises(ConfigError, match=r"model\.db"):
        SnapshotStore(path).looks(1)
    with pytest.raises(OSError, match=r"model\.db"):
        SnapshotStore(path).add(look(world()), world())


def test_looks_of_a_hostile_store_are_checked(tmp_path: Path) -> None:
    path = _broken(tmp_path / "model.db", 'update looks set body = cast(\'{"at": "x"}\' as blob)')
    with pytest.raises(ConfigError, match="look"):
        SnapshotStore(path).looks(5)


def test_presence_is_that_of_the_first_look_of_ten_minutes(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "model.db")
    first = world(200)  # a slot begins at 1e9 + 200
    peers = [node.peer_id for node in first.nodes]
    away = replace(world(1400), nodes=first.nodes[1:], joining=())
    loading = replace(world(2000), nodes=first.nodes[1:], joining=first.nodes[:1])
    for snapshot in (first, replace(away, taken_at=1e9 + 799), away, loading):
        store.add(look(snapshot), snapshot)
    store.add(look(world(2600)), replace(world(2600), nodes=(), joining=()))
    here_TN, seen_T = store.presence(peers[:2], 1e9 + 3300)
    assert here_TN.shape == (PAST_SLOTS + 1, 2)
    assert seen_T.nonzero()[0].tolist() == [PAST_SLOTS - each for each in (5, 3, 2, 0)]
    assert here_TN[seen_T].tolist() == [[True, True], [False, True], [True, True], [True, True]]
    assert not here_TN[~seen_T].any()
    assert store.presence([PeerId("new")], 1e9 + 3300)[0].sum() == 1
    # Another orchestrator's clock may be late: what comes after is not read.
    assert store.presence(peers, 1e9 + 200)[1].sum() == 1


def test_presence_of_two_weeks_is_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "model.db")
    store.add(look(world()), world())
    with sqlite3.connect(store.path) as database:
        before = slot_of(1e9)
        rows = [(before - 1 - each, b"x" * 8) for each in range(PAST_SLOTS + 20)]
        database.executemany("insert into presence values (?, ?)", rows)
    store.add(look(world(800)), world(800))
    with sqlite3.connect(store.path) as database:
        ((count, oldest),) = database.execute("select count(*), min(slot) from presence")
    database.close()
    assert count == PAST_SLOTS
    assert oldest > before - 1 - PAST_SLOTS


@pytest.mark.parametrize(
    "statement",
    [
        "drop table presence",  # as before it was kept
        "update presence set peers = 'text'",
        "update presence set peers = zeroblob(12)",
        "update presence set peers = zeroblob(100000000)",
    ],
)
def test_presence_that_cannot_be_read_counts_as_not_seen(statement: str, tmp_path: Path) -> None:
    store = SnapshotStore(_broken(tmp_path / "model.db", statement))
    peers = [node.peer_id for node in world().nodes]
    here_TN, seen_T = store.presence(peers, 1e9 + 1000)
    assert (int(here_TN.sum()), int(seen_T.sum())) == (len(peers), 1)
    assert History(store).forecast(world(1000)) == {}


def test_a_broken_store_forecasts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.db"
    path.write_bytes(b"x" * 5000)
    assert History(SnapshotStore(path)).forecast(world()) == {}
    assert History(SnapshotStore(tmp_path / "none.db")).forecast(world()) == {}
    assert History().forecast(world()) == {}


def test_a_models_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    assert snapshots_path(tmp_path, "../../a/b@0").parent == tmp_path


def test_history_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "model.db")
    planner, history = Rebalancer(), History(store)
    history.load()
    for at in range(6):
        snapshot = slower(world(at * 30), 1.0 + 4.0 * (at % 2), only=0)
        history.record(snapshot, planner.decide(snapshot), None, leads=True)
    again = History(SnapshotStore(store.path))
    again.load()
    assert again.document() is None
    again.record(world(180), None, None, leads=False)
    document = again.document()
    assert document is not None
    assert len(document["history"]["at"]) == 7
    scores = [node["stability"] for node in document["nodes"]]
    assert scores[0] == min(scores) < 0.5
    assert max(scores) > 0.9
    assert json.dumps(document, allow_nan=False)


def test_a_broken_store_does_not_stop_an_orchestrator(tmp_path: Path) -> None:
    path = tmp_path / "model.db"
    path.write_bytes(b"x" * 5000)
    history = History(SnapshotStore(path))
    history.load()
    history.record(world(), None, None, leads=False)
    assert history.document() is not None
    assert path.read_bytes() == b"x" * 5000


def test_a_store_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(tmp_path / "model.db")
    whole = world()
    for at in range(4):
        snapshot = replace(world(60 * at), nodes=whole.nodes if at < 2 else whole.nodes[1:])
        store.add(look(snapshot), snapshot, always=True)
    assert run_command(["simulate", "--replay", str(store.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["at_s"] for row in rows] == [0, 60, 120, 180]
    assert [row["nodes"] for row in rows] == [8, 8, 7, 7]
    assert run_command(["simulate", "--replay", str(store.path)]) == 0
    assert run_command(
        ["simulate", "--replay", str(_broken(tmp_path / "b.db", "drop table looks"))]
    )
    assert "not a snapshot store" in capsys.readouterr().err
