"""What becomes of nodes, by their records and the clock alone."""

from __future__ import annotations

import pytest

from nesa_node.core.ids import PeerId
from nesa_node.dashboard.node_tracker import (
    FAILURE_VALID_S,
    MAX_EVENTS_PER_KIND,
    MAX_TRACKED_NODES,
    DashboardEvent,
    EventLog,
    NodeTracker,
)
from tests.dashboard.records import TTL_S, record

A, B = PeerId("peer-a"), PeerId("peer-b")
START = 1000.0


def kinds(events: list[DashboardEvent]) -> list[str]:
    return [event.kind for event in events]


@pytest.fixture
def seen() -> NodeTracker:
    sightings = NodeTracker()
    sightings.update_records([record(A)], START)
    return sightings


def test_first_look_finds_nodes_and_later_ones_see_them_join() -> None:
    sightings = NodeTracker()
    events = sightings.update_records([record(A), record(B, (4, 8))], START)
    assert kinds(events) == ["watching"]
    assert "2 nodes" in events[0].text
    joined = sightings.update_records(
        [record(A), record("c", (8, 12), public_name="third")], START + 1
    )
    assert kinds(joined) == ["joined"]
    assert (joined[0].name, joined[0].text) == ("third", "joined, serving blocks 8:12")


def test_node_is_lost_at_the_expiry_of_its_record_and_kept_for_ten_minutes(
    seen: NodeTracker,
) -> None:
    last_words = record(A, at=START, load=0.7)
    assert seen.advance_time(START + TTL_S - 0.01) == []
    (event,) = seen.advance_time(START + TTL_S)
    assert (event.kind, event.peer) == ("lost", A)
    assert seen.nodes[A].lost_at == last_words.expires_at
    assert seen.advance_time(START + TTL_S + 1) == []
    seen.advance_time(START + TTL_S + 599)
    assert A in seen.nodes
    seen.advance_time(START + TTL_S + 600)
    assert A not in seen.nodes


def test_renewed_record_keeps_a_node_alive(seen: NodeTracker) -> None:
    assert seen.update_records([record(A, at=START + 20)], START + 21) == []
    assert seen.advance_time(START + TTL_S + 5) == []
    assert seen.nodes[A].lost_at is None


def test_node_that_says_goodbye_has_left_and_is_not_lost(seen: NodeTracker) -> None:
    (event,) = seen.update_records([record(A, at=START + 5, state="withdrawn")], START + 5)
    assert event.kind == "left"
    assert not seen.nodes
    assert seen.update_records([record(A, at=START + 5, state="withdrawn")], START + 6) == []
    assert seen.advance_time(START + 100) == []


def test_lost_node_that_comes_back_is_not_lost_any_more(seen: NodeTracker) -> None:
    seen.advance_time(START + TTL_S)
    (event,) = seen.update_records([record(A, at=START + 60)], START + 60)
    assert (event.kind, event.text) == ("back", "is back after 30 s, serving blocks 0:4")
    assert seen.nodes[A].lost_at is None


def test_move_is_told_from_drain_to_the_new_span(seen: NodeTracker) -> None:
    steps = [
        record(A, at=START + 1, state="draining", next_span=(4, 8)),
        record(A, (4, 8), at=START + 2, state="joining"),
        record(A, (4, 8), at=START + 3),
    ]
    events = [event for step in steps for event in seen.update_records([step], step.issued_at)]
    assert kinds(events) == ["draining", "moved", "serving"]
    assert events[0].text == "finishes its sessions to move to blocks 4:8"
    assert events[1].text == "moved from blocks 0:4 to 4:8"


def test_restart_within_the_life_of_a_record_is_noticed(seen: NodeTracker) -> None:
    (event,) = seen.update_records([record(A, at=START + 8, uptime_s=2.0)], START + 8)
    assert event.kind == "restarted"


def test_older_records_and_expired_ones_change_nothing(seen: NodeTracker) -> None:
    assert seen.update_records([record(A, (4, 8), at=START - 1)], START + 1) == []
    assert seen.update_records([record(B, at=START - TTL_S)], START + 1) == []
    assert list(seen.nodes) == [A]


def test_tokens_per_second_come_from_two_records_and_end_with_the_node(seen: NodeTracker) -> None:
    seen.update_records([record(A, at=START + 10, tokens=500)], START + 10)
    assert seen.nodes[A].tokens_per_s == pytest.approx(50)
    seen.update_records([record(A, at=START + 12, tokens=100)], START + 12)
    assert seen.nodes[A].tokens_per_s == 0
    seen.update_records([record(A, at=START + 14, tokens=200)], START + 14)
    seen.advance_time(START + 14 + TTL_S)
    assert seen.nodes[A].tokens_per_s == 0


def test_tokens_of_a_long_silence_are_no_rate(seen: NodeTracker) -> None:
    seen.update_records([record(A, at=START + 120, tokens=1200)], START + 120)
    assert seen.nodes[A].tokens_per_s == pytest.approx(10)
    seen.update_records([record(A, at=START + 241, tokens=2400)], START + 241)
    assert seen.nodes[A].tokens_per_s == 0


def test_flood_of_nodes_is_bounded_and_pushes_nobody_out() -> None:
    sightings, log = NodeTracker(), EventLog()
    log.add(sightings.update_records([record(A)], START))
    for batch in range(4):
        many = [record(f"{batch}-{number}", at=START + 1) for number in range(5000)]
        log.add(sightings.update_records(many, START + 1 + batch))
    assert len(sightings.nodes) == MAX_TRACKED_NODES
    assert A in sightings.nodes
    # Each batch is one event.
    assert kinds(list(log.kept.values())).count("joined") == 4
    assert "5000 nodes at once" in list(log.kept.values())[-1].text


def test_event_log_keeps_the_newest_of_each_kind() -> None:
    log = EventLog()
    log.add([DashboardEvent(at=0, kind="lost", text="is lost")])
    for number in range(MAX_EVENTS_PER_KIND + 10):
        log.add([DashboardEvent(at=number, kind="joined", text=str(number))])
    assert (len(log.kept), log.num_added) == (MAX_EVENTS_PER_KIND + 1, MAX_EVENTS_PER_KIND + 11)
    assert log.kept[0].kind == "lost"
    assert list(log.kept) == sorted(log.kept)
    assert log.kept[log.num_added - 1].text == str(MAX_EVENTS_PER_KIND + 9)


def test_two_records_in_a_row_are_no_rate(seen: NodeTracker) -> None:
    """A node says at once that it serves or drains; what came through in between is luck."""
    seen.update_records([record(A, at=START + 10, tokens=100)], START + 10)
    seen.update_records([record(A, at=START + 20, tokens=300)], START + 20)
    assert seen.nodes[A].tokens_per_s == 20
    seen.update_records([record(A, at=START + 20.001, tokens=2**49)], START + 20.001)
    assert seen.nodes[A].tokens_per_s == 20
    seen.update_records([record(A, at=START + 30, tokens=600)], START + 30)
    assert seen.nodes[A].tokens_per_s == 30


def test_many_failovers_are_those_of_sessions_and_not_of_nodes() -> None:
    log = EventLog()
    log.add(DashboardEvent(at=START, kind="failover", text=f"Session {each}") for each in range(64))
    assert [event.text for event in log.kept.values()] == ["64 sessions at once: failover"]


def test_node_that_stops_answering_pings_is_failing_until_it_answers_or_expires(
    seen: NodeTracker,
) -> None:
    seen.record_ping(A, answered=True)
    assert seen.advance_time(START + 1) == []
    seen.record_ping(A, answered=False)
    (event,) = seen.advance_time(START + 2)
    assert (event.kind, event.peer) == ("failing", A)
    assert seen.nodes[A].failing_since == START + 2
    seen.record_ping(A, answered=True)
    assert kinds(seen.advance_time(START + 4)) == ["back"]
    seen.record_ping(A, answered=False)
    assert kinds(seen.advance_time(START + 5)) == ["failing"]
    assert kinds(seen.advance_time(START + TTL_S)) == ["lost"]
    assert seen.advance_time(START + TTL_S + 1) == []
    assert kinds(seen.update_records([record(A, at=START + 40)], START + 40)) == ["back"]


def test_node_that_never_answered_a_ping_may_be_out_of_reach_for_us_alone(
    seen: NodeTracker,
) -> None:
    seen.record_ping(A, answered=False)
    assert seen.advance_time(START + 1) == []


def test_node_that_failed_a_session_is_failing_until_it_renews_its_record(
    seen: NodeTracker,
) -> None:
    seen.record_failure(A, START + 3)
    assert kinds(seen.advance_time(START + 3.1)) == ["failing"]
    assert kinds(seen.update_records([record(A, at=START + 5)], START + 5)) == ["back"]
    seen.record_failure(A, START + 3)
    assert seen.advance_time(START + 6) == []
    seen.record_failure(A, START + 7)
    assert kinds(seen.advance_time(START + 7.1)) == ["failing"]
    assert kinds(seen.advance_time(START + 7.1 + FAILURE_VALID_S)) == ["back"]
