"""When refusals by a node that announces room are told to others."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from nesa_node.client.routing.measurements import (
    MIN_REFUSED_RECORDS,
    REFUSAL_WINDOW_S,
    RefusalTracker,
)
from nesa_node.core.ids import PeerId

PEER, OTHER = PeerId("a"), PeerId("b")


@dataclass(eq=False)
class _Link:
    closed: bool = False


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_refuses_after_each_of_its_records_is_told() -> None:
    doors = RefusalTracker(_Clock())
    told = [doors.record_refusal(PEER, record) for record in range(2 * MIN_REFUSED_RECORDS)]
    assert told == [False, False, True] * 2


def test_many_refusals_after_one_record_prove_nothing() -> None:
    """A record is ten seconds old at times: somebody else may have come first."""
    doors = RefusalTracker(_Clock())
    assert not any(doors.record_refusal(PEER, 7) for _ in range(100))
    assert not doors.record_refusal(OTHER, 8)


def test_a_session_that_it_opened_clears_a_node() -> None:
    doors = RefusalTracker(_Clock())
    doors.record_refusal(PEER, 1)
    doors.record_refusal(PEER, 2)
    doors.record_accepted(PEER, _Link(closed=True))
    assert not doors.record_refusal(PEER, 3)


def test_who_serves_this_client_may_have_no_room_for_more_of_it() -> None:
    doors, link = RefusalTracker(_Clock()), _Link()
    doors.record_accepted(PEER, link)
    assert not any(doors.record_refusal(PEER, record) for record in range(10))
    link.closed = True
    assert [doors.record_refusal(PEER, record) for record in (20, 21, 22)] == [False, False, True]
    lost = _Link()
    doors.record_accepted(PEER, lost)
    del lost  # nobody closed it
    gc.collect()
    assert [doors.record_refusal(PEER, record) for record in (30, 31, 32)] == [False, False, True]


def test_refusals_of_long_ago_are_forgotten() -> None:
    clock = _Clock()
    doors = RefusalTracker(clock)
    doors.record_refusal(PEER, 1)
    doors.record_refusal(PEER, 2)
    clock.now = REFUSAL_WINDOW_S + 1
    assert not doors.record_refusal(PEER, 3)
