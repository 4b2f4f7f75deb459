"""The observer's loops, over a swarm that a test scripts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.dashboard import observer as module
from nesa_node.dashboard.feed import StateFeed
from nesa_node.dashboard.observer import ModelTopologies, SwarmObserver
from nesa_node.dashboard.state import DashboardState
from nesa_node.dashboard.views import plan_entry
from nesa_node.sharding.graph_plan import GraphPlan, PieceWork
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.graph_plans import PlannedModel
from nesa_node.topology.snapshot import Snapshot
from tests.dashboard.records import BLOCKS, MODEL, plan, record

NOW = 1000.0


class Directory:
    """As much of one as is asked for."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self.gone: list[NodeRecord] = []
        self.failures = 0
        self.looks = 0

    async def fetch_all(self) -> list[NodeRecord]:
        self.looks += 1
        if self.failures:
            self.failures -= 1
            raise SwarmError("nobody answers")
        return self.records

    def withdrawn_records(self) -> list[NodeRecord]:
        return self.gone

    def addresses(self, model: Any, num_blocks: int) -> dict[str, tuple[str, ...]]:
        return {record.peer_id: () for record in self.records}

    def snapshot(self, model: Any) -> Snapshot:
        nodes = tuple(record.node_state() for record in self.records)
        return Snapshot(model, BLOCKS, nodes, NOW)

    def measured_links(self, snapshot: Snapshot) -> dict[Any, Any]:
        return {node.peer_id: () for node in snapshot.nodes}


class Swarm:
    def __init__(self) -> None:
        self.directory = Directory()
        self.notices = self
        self.transport = None

    async def fetch(self, kind: Any, model: Any) -> list[Any]:
        return []


class Seen:
    def __init__(self, audits_path: Path | None = None) -> None:
        self.swarm = Swarm()
        self.board = DashboardState(playground=False, poll_interval_s=0.05)
        self.feed = StateFeed(self.board.sections)
        self.shapes = ModelTopologies()
        swarm: Any = self.swarm
        self.observer = SwarmObserver(
            swarm,
            self.board,
            self.feed,
            self.shapes,
            audits_path=audits_path,
            poll_interval_s=0.05,
            clock=lambda: NOW,
        )

    async def until(self, section: str, *keys: str) -> None:
        async with asyncio.timeout(10):
            while set(self.section(section)) != set(keys):
                await self.feed.wait_for_change(self.board.sections.version)

    def section(self, name: str) -> dict[str, Any]:
        found = json.loads(self.board.sections.encode_since(None))["sections"].get(name, {})
        assert isinstance(found, dict)
        return found


@asynccontextmanager
async def running(seen: Seen) -> AsyncIterator[None]:
    task = asyncio.create_task(seen.observer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def seen() -> Seen:
    return Seen()


async def test_audits_that_clients_write_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "audits.db"
    seen = Seen(path)
    seen.swarm.directory.records = [record("a"), record("b", (4, 12))]
    await seen.observer.poll_records()
    assert {each["passed_audits"] for each in seen.section("nodes").values()} == {0}
    history = AuditHistory(path)
    history.record_passed(PeerId("a"))
    history.bar(PeerId("b"), "wrong activations")
    await seen.observer.poll_records()
    found = seen.section("nodes")
    assert (found["a"]["passed_audits"], found["a"]["barred_for"]) == (1, None)
    assert (found["b"]["passed_audits"], found["b"]["barred_for"]) == (0, "wrong activations")
    path.write_bytes(b"no database")
    await seen.observer.poll_records()
    assert seen.section("nodes")["a"]["passed_audits"] == 0


async def test_nodes_come_and_go_as_their_records_do(seen: Seen) -> None:
    directory = seen.swarm.directory
    directory.records = [record("a"), record("b", (4, 12))]
    async with running(seen):
        await seen.until("nodes", "a", "b")
        directory.records = directory.records[:1]
        directory.gone = [record("b", (4, 12), at=NOW + 1, state="withdrawn")]
        await seen.until("nodes", "a")
        await seen.until("events", "0", "1", "2")
        kinds = [event["kind"] for event in seen.section("events").values()]
        assert kinds == ["watching", "left", "hole"]


async def test_swarm_that_does_not_answer_is_asked_again(seen: Seen) -> None:
    directory = seen.swarm.directory
    directory.failures, directory.records = 3, [record("a")]
    async with running(seen):
        await seen.until("nodes", "a")
        assert directory.looks >= 4


async def test_large_swarms_are_looked_at_less_often(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_RECORDS_PER_S", 5)
    directory = seen.swarm.directory
    directory.records = [record(f"p{number}") for number in range(10)]
    async with running(seen):
        await seen.until("nodes", *(f"p{number}" for number in range(10)))
        await asyncio.sleep(0.4)
        assert directory.looks == 1


async def test_shape_of_each_model_is_watched(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_TOPOLOGY_DELAY_S", 0.1)
    monkeypatch.setattr(module, "TOPOLOGY_INTERVAL_S", 0.1)
    seen.swarm.directory.records = [record("a"), record("b", (4, 12))]
    async with running(seen):
        deadline = time.monotonic() + 20
        body = None
        while (body is None or b"starting" in body) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            body = await seen.shapes.encode_json(MODEL)
        assert body is not None
        report = json.loads(body)
        assert len(report["nodes"]) == 2
        assert "shift" in report["history"]["triggers"]
        assert report["shapes"]["round_trips"]["h0"]["bars"] == [[0.0, None], [0.0, None]]


async def test_thousands_of_records_are_taken_in_beside_the_event_loop(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the loop that streams a gateway's tokens."""
    threads: set[int] = set()
    look, tick, measure = (
        seen.board.update_records,
        seen.board.advance_time,
        seen.board.update_links,
    )

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            threads.add(threading.get_ident())
            return method(*args)

        return called

    for name, method in (
        ("update_records", look),
        ("advance_time", tick),
        ("update_links", measure),
    ):
        monkeypatch.setattr(seen.board, name, noted(method))
    seen.swarm.directory.records = [record("a"), record("b", (4, 12))]
    async with running(seen):
        await seen.until("nodes", "a", "b")
    assert threads
    assert threading.get_ident() not in threads


async def test_time_does_not_pass_while_a_look_is_taken_in(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both change what is known of the nodes."""
    under_way: list[str] = []
    together: list[str] = []

    def slow(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            together.extend(under_way)
            under_way.append(name)
            time.sleep(0.02)
            under_way.remove(name)
            return method(*args)

        return called

    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.001)
    for name in ("update_records", "advance_time", "update_links"):
        monkeypatch.setattr(seen.board, name, slow(name, getattr(seen.board, name)))
    seen.swarm.directory.records = [record("a")]
    async with running(seen):
        await seen.until("nodes", "a")
        await asyncio.sleep(0.3)
    assert not together


async def test_no_snapshot_is_made_of_swarms_too_large_to_show(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_TOPOLOGY_DELAY_S", 0.1)
    monkeypatch.setattr(module, "TOPOLOGY_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "MAX_TOPOLOGY_NODES", 2)
    asked: list[Any] = []
    monkeypatch.setattr(seen.swarm.directory, "snapshot", asked.append)
    seen.swarm.directory.records = [record(peer) for peer in "abc"]
    async with running(seen):
        await seen.until("nodes", "a", "b", "c")
        await asyncio.sleep(0.4)
    assert asked == []


async def test_few_nodes_of_a_large_swarm_are_pinged_at_once_and_all_in_turn(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "MAX_CONCURRENT_PINGS", 3)
    pinged: list[str] = []
    goes_on = asyncio.Event()

    async def ping(_transport: object, peer: str, *_: object, timeout_s: float) -> None:
        pinged.append(peer)
        await goes_on.wait()

    monkeypatch.setattr(module, "ping", ping)
    peers = [f"p{number}" for number in range(10)]
    seen.swarm.directory.records = [record(peer) for peer in peers]
    async with running(seen):
        await seen.until("nodes", *peers)
        with seen.feed.hold_viewer_slot():
            async with asyncio.timeout(10):
                while len(pinged) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(pinged) == 3
            goes_on.set()
            async with asyncio.timeout(10):
                while set(pinged) != set(peers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_plans_of_networks_are_fetched_once_and_again_after_a_failure(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = "tiny@0.0123456789abcdef"
    asked: list[str] = []
    answers: list[Any] = [
        SwarmError("no node sent the plan"),
        plan((PieceWork(3000.0, 10, 4, 8), PieceWork(1.0, 0, 8, 2))),
    ]

    async def fetch_plan(_: Any, found: PlannedModel, __: Any) -> GraphPlan:
        asked.append(found.model_id)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, GraphPlan)
        return answer

    monkeypatch.setattr(module, "fetch_plan", fetch_plan)
    monkeypatch.setattr(module, "PLAN_RETRY_S", 0.0)
    seen.swarm.directory.records = [
        record("a"),
        record("b", (0, 2), model_id=network, num_blocks=2),
    ]
    await seen.observer.poll_records()
    for _ in range(4):
        await seen.observer.poll_plans()
    assert asked == [network, network]
    assert seen.section("plans") == {
        network: {
            "dtype": "float32",
            "batch": 1,
            "tokens": 8,
            "image_size": None,
            "pieces": [[2, 3000.0, 10, 4, 8], [1, 1, 0, 8, 2]],
        }
    }


def test_plan_that_does_not_say_what_its_pieces_take_is_shown_all_the_same() -> None:
    work = PieceWork(3000.0, 10, 4, 8)
    for told, rows in (((), [[2, 0, 0, 0, 0], [1, 0, 0, 0, 0]]), ((work,) * 5, None)):
        found = plan_entry(plan(told))["pieces"]
        assert len(found) == 2
        assert rows is None or found == rows
