"""Peers cannot fill a log."""

from __future__ import annotations

import io
import json

import pytest

from nesa_node.core import logging as our_logging
from nesa_node.core.logging import (
    EVENTS_PER_S,
    MAX_EVENT_BURST,
    MAX_EVENT_NAMES,
    TRACEBACK_COST_EVENTS,
    EventRateLimiter,
    get_logger,
    setup_logging,
)

pytestmark = pytest.mark.usefixtures("logging_given_back")


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_day_of_one_event_is_bounded_and_counted() -> None:
    clock = _Clock()
    limit = EventRateLimiter(clock)
    said = told = 0
    for _ in range(200_000):
        clock.now += 0.01
        left_out = limit.admit("session_opened")
        if left_out is not None:
            said += 1
            told += left_out
    assert said == pytest.approx(MAX_EVENT_BURST + EVENTS_PER_S * clock.now, rel=0.01)
    assert said + told == pytest.approx(200_000, abs=200)
    assert limit.admit("another") == 0


def test_tracebacks_are_said_less_often() -> None:
    limit = EventRateLimiter(_Clock())
    said = [limit.admit("failed", has_traceback=True) for _ in range(1000)]
    assert said.count(0) == MAX_EVENT_BURST / TRACEBACK_COST_EVENTS


def test_names_are_remembered_up_to_a_number() -> None:
    limit = EventRateLimiter(_Clock())
    for index in range(3 * MAX_EVENT_NAMES):
        limit.admit(str(index))
    assert len(limit._buckets) <= MAX_EVENT_NAMES


def test_log_leaves_out_what_comes_too_often_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = _Clock(), io.StringIO()
    monkeypatch.setattr(our_logging, "_clock", clock)
    setup_logging("info", "json", out)
    log = get_logger("nesa_node.test")
    for number in range(3000):
        log.info("session_opened", number=number)
        log.debug("not_shown")
    log.error("something_else")
    clock.now += 2 / EVENTS_PER_S
    log.info("session_opened", number=-1)
    written = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(written) == MAX_EVENT_BURST + 2
    assert written[-1]["not_logged"] == 3000 - MAX_EVENT_BURST
    assert "not_logged" not in written[0]


@pytest.mark.parametrize("event", sorted(our_logging.UNLIMITED_EVENTS))
def test_what_only_key_holders_cause_is_all_there(event: str) -> None:
    out = io.StringIO()
    setup_logging("info", "json", out)
    for _ in range(3000):
        get_logger("nesa_node.test").info(event)
    assert len(out.getvalue().splitlines()) == 3000
