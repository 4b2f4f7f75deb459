from __future__ import annotations

from nesa_node.server.session.message_loop import BUSY_POLL_S, Drain


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_session_may_stay_to_the_end_of_a_drain() -> None:
    clock = _Clock()
    drain = Drain(clock=clock)
    drain.begin(30.0)
    assert drain.session_remaining_s(0.0, busy=False) == 30.0
    clock.now += 31.0
    assert drain.remaining_s == 0.0
    assert drain.session_remaining_s(clock.now, busy=True) == 0.0


def test_session_that_does_nothing_goes_before_the_end() -> None:
    clock = _Clock()
    drain = Drain(clock=clock)
    drain.begin(30.0, idle_s=5.0)
    assert drain.session_remaining_s(0.0, busy=False) == 5.0, "it hears of the drain only now"
    clock.now += 4.0
    active_at = clock.now
    clock.now += 3.0
    assert drain.session_remaining_s(active_at, busy=False) == 2.0
    clock.now += 2.0
    assert drain.session_remaining_s(active_at, busy=False) == 0.0
    assert drain.session_remaining_s(active_at, busy=True) == BUSY_POLL_S


def test_second_drain_leaves_no_more_time_than_the_first() -> None:
    clock = _Clock()
    drain = Drain(clock=clock)
    drain.begin(30.0)
    clock.now += 20.0
    drain.begin(30.0)
    assert drain.remaining_s == 10.0
    drain.begin(2.0)
    assert drain.remaining_s == 2.0
