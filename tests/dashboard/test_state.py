"""The board: what sections hold after what was seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nesa_node.client.model.activity import SessionActivity, SessionFailover
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.wait_tracking import WaitStatus
from nesa_node.dashboard.node_tracker import LOST_RETENTION_S
from nesa_node.dashboard.state import (
    CHART_INTERVAL_S,
    ENDED_RETENTION_S,
    MAX_CHARTED_MODELS,
    MAX_SHOWN_SESSIONS,
    DashboardState,
    LinksSummary,
    summarize_links,
)
from nesa_node.dashboard.views import MAX_SHOWN_LOST_NODES, MAX_SHOWN_NODES
from nesa_node.routing.chains import Hop
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, peer_digest
from tests.dashboard.records import BLOCKS, MODEL, TTL_S, plan, record

START = 1000.0
PLAYED = SessionActivity(
    id="0123456789abcdef",
    model_id=ModelId(MODEL),
    state="decode",
    hops=(Hop(PeerId("a"), Span(0, 12)),),
    began_at=START,
    prompt_tokens=5,
    generated_tokens=40,
    tokens_per_s=20.0,
    failovers=0,
)


class Scripted:
    """An activity as a test wants it."""

    def __init__(self) -> None:
        self.open: list[SessionActivity] = []
        self.over: list[SessionActivity] = []
        self.lost: list[SessionFailover] = []

    def sessions(self) -> Sequence[SessionActivity]:
        return self.open

    def ended_sessions(self) -> Sequence[SessionActivity]:
        return self.over

    def failovers(self) -> Sequence[SessionFailover]:
        return self.lost


@pytest.fixture
def board() -> DashboardState:
    return DashboardState(playground=True, poll_interval_s=1.0)


def sections(board: DashboardState) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(board.sections.encode_since(None))["sections"]
    return found


def test_everything_that_is_seen_is_in_a_section(board: DashboardState) -> None:
    assert sections(board)["about"]["starting"] is True
    activity = Scripted()
    activity.open = [PLAYED]
    board.update_records([record("a", (0, 12), public_name="ada")], START)
    assert board.advance_time(START, activity)
    found = sections(board)
    assert found["about"]["starting"] is False
    assert found["nodes"]["a"]["name"] == "ada"
    assert found["models"][MODEL]["runs"] == [[0, BLOCKS, 1]]
    assert found["sessions"][PLAYED.id]["hops"] == [["a", 0, 12]]
    assert [event["kind"] for event in found["events"].values()] == ["watching"]
    (point,) = found["series"].values()
    assert point["own"] == [20.0, 50.0]


def test_nothing_new_is_nothing_to_tell(board: DashboardState) -> None:
    board.update_records([record("a")], START)
    assert board.advance_time(START, None)
    assert not board.advance_time(START + 1, None)
    assert board.advance_time(START + CHART_INTERVAL_S, None)


def test_addresses_and_content_are_in_no_section(board: DashboardState) -> None:
    address = "/ip4/192.0.2.7/tcp/4001/p2p/a"
    board.update_records([record("a", addresses=(address,), location=(52.5, 13.4))], START)
    board.advance_time(START, None)
    text = board.sections.encode_since(None).decode()
    assert "192.0.2" not in text
    assert "52.5" not in text


def test_session_that_is_over_stays_for_a_moment(board: DashboardState) -> None:
    activity = Scripted()
    activity.over = [replace(PLAYED, ended_at=START + 1)]
    board.update_records([record("a", (0, 12))], START)
    board.advance_time(START + 1, activity)
    assert sections(board)["sessions"][PLAYED.id]["state"] == "ended"
    board.advance_time(START + 1 + ENDED_RETENTION_S, activity)
    assert sections(board)["sessions"] == {}


def test_sessions_that_are_shown_are_bounded_and_the_rest_is_counted(board: DashboardState) -> None:
    activity = Scripted()
    activity.open = [
        replace(PLAYED, id=f"{number:016x}") for number in range(MAX_SHOWN_SESSIONS + 7)
    ]
    board.update_records([record("a", (0, 12))], START)
    board.advance_time(START, activity)
    board.update_records([record("a", (0, 12), at=START + 1)], START + 1)
    assert len(sections(board)["sessions"]) == MAX_SHOWN_SESSIONS
    assert sections(board)["about"]["sessions_left_out"] == 7


def test_failover_is_told_once(board: DashboardState) -> None:
    activity = Scripted()
    board.update_records([record("a", (0, 12), public_name="ada")], START)
    activity.lost = [
        SessionFailover(
            at=START, session_id=PLAYED.id, lost=(PeerId("a"), PeerId("gone-peer")), took_ms=84
        )
    ]
    for step in range(3):
        board.advance_time(START + step, activity)
    told = [e for e in sections(board)["events"].values() if e["kind"] == "failover"]
    assert [event["text"] for event in told] == [
        "Session 01234567 went on without ada, …e-peer after 84 ms"
    ]


def test_swarm_that_goes_silent_altogether_may_be_our_own_loss(board: DashboardState) -> None:
    board.update_records([record("a"), record("b")], START)
    board.advance_time(START + TTL_S, None)
    assert sections(board)["about"]["cut_off"] is True
    board.update_records([record("a", at=START + 40)], START + 40)
    assert sections(board)["about"]["cut_off"] is False


def test_five_thousand_nodes_are_counted_and_some_are_shown(board: DashboardState) -> None:
    many = [record(f"p{n}", (0, 12), public_name="x" * 64) for n in range(5000)]
    board.update_records(many, START)
    board.advance_time(START, None)
    found = sections(board)
    assert len(found["nodes"]) == MAX_SHOWN_NODES
    assert found["about"]["nodes_left_out"] == 5000 - MAX_SHOWN_NODES
    assert found["models"][MODEL]["runs"] == [[0, BLOCKS, 5000]]
    assert len(board.sections.encode_since(None)) < 400_000
    board.advance_time(START + TTL_S, None)
    shown = sections(board)["nodes"].values()
    assert len([node for node in shown if node["state"] == "lost"]) == MAX_SHOWN_LOST_NODES


def test_links_come_from_what_nodes_have_measured() -> None:
    def measuring(peer: str, other: str, rtt_ms: float, span: tuple[int, int]) -> NodeRecord:
        link = MeasuredLink(peer_digest(PeerId(other)), rtt_ms, 12e6, 60.0)
        packed = pack_links([link])
        return record(peer, span, measured=packed, decode_tokens_per_s=100.0)

    records = [measuring("a", "b", 20.0, (0, 6)), measuring("b", "a", 24.0, (6, 12))]
    view = summarize_links(ModelId(MODEL), records, BLOCKS)
    assert view.entries == {"a|b": {"rtt_ms": 20.0, "bytes_per_s": [1.2e7, 1.2e7], "age_min": 1}}
    assert view.median_rtt_ms == pytest.approx(20.0)
    assert view.step_s is not None
    # Both compute for 10 ms, and the way between them takes half a round trip.
    assert 0.03 < view.step_s < 0.04
    assert summarize_links(ModelId(MODEL), records[:1], BLOCKS).step_s is None
    assert summarize_links(ModelId(MODEL), [], 1).entries == {}


def test_links_of_models_that_are_not_measured_any_more_go(board: DashboardState) -> None:
    """They would stay on the page as they were."""
    several = [record(f"{model}{number}", model_id=model) for model in "vwxyz" for number in (1, 2)]
    board.update_records(several[:8], START)
    board.update_links(ModelId("v"), LinksSummary({"v1|v2": {}}))
    board.update_links(ModelId("w"), LinksSummary({"w1|w2": {}}))
    board.update_records([*several, record("z3", model_id="z")], START + 1)
    charted = [model.model_id for model in board.models[:MAX_CHARTED_MODELS]]
    assert charted == ["z", "v", "w", "x"]
    board.update_records([record(f"y{number}", model_id="y") for number in range(3, 6)], START + 2)
    board.update_records([record(f"x{number}", model_id="x") for number in range(3, 6)], START + 2)
    board.update_links(ModelId("v"), LinksSummary({"v1|v2": {}}))
    assert [model.model_id for model in board.models[:MAX_CHARTED_MODELS]] == ["x", "y", "z", "v"]
    assert set(sections(board)["links"]) == {"v1|v2"}


def test_the_plan_of_a_network_goes_with_its_last_node(board: DashboardState) -> None:
    network = ModelId("tiny@0.0123456789abcdef")
    board.update_records([record("a"), record("b", (0, 2), model_id=network, num_blocks=2)], START)
    board.update_plan(network, plan())
    assert set(sections(board)["plans"]) == {network}
    board.update_records([record("a", at=START + TTL_S)], START + TTL_S)
    board.advance_time(START + TTL_S + LOST_RETENTION_S, None)
    assert not sections(board)["plans"]


def test_placement_is_told_with_the_time_at_which_it_was_made(board: DashboardState) -> None:
    """A page that has just been started finds some that are minutes old."""
    made = PlacementNotice.model_construct(
        peer_id="a",
        model_id=MODEL,
        epoch=1,
        seq=1,
        moves=(),
        reason="because",
        issued_at=START - 300,
    )
    board.update_records([record("a")], START)
    board.report_placements(
        [made, made.model_copy(update={"seq": 2, "issued_at": START + 5})], START
    )
    board.advance_time(START, None)
    told = [each for each in sections(board)["events"].values() if each["kind"] == "placement"]
    assert [each["at"] for each in told] == [START - 300, START]


def test_failing_node_holds_nothing_and_a_session_says_what_it_waits_for(
    board: DashboardState,
) -> None:
    board.update_records([record("a", (0, 8)), record("b", (4, 12))], START)
    wait = WaitStatus(
        what="room", since=START, blocks=(Span(4, 12),), peers=(PeerId("b"),), limit_s=30
    )
    activity = Scripted()
    activity.open = [replace(PLAYED, waits_for=wait, failed=((PeerId("b"), START + 3),))]
    board.advance_time(START + 3, activity)
    told = sections(board)
    assert told["models"][MODEL]["runs"] == [[0, 8, 1], [8, 12, 0]]
    assert told["models"][MODEL]["failing"] == 1
    assert told["nodes"]["b"]["state"] == "failing"
    assert told["sessions"][PLAYED.id]["waits_for"] == {
        "what": "room",
        "blocks": [[4, 12]],
        "peers": ["b"],
        "since": START,
        "limit_s": 30,
    }
    assert {"failing", "hole"} <= {event["kind"] for event in told["events"].values()}
