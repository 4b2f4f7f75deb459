"""When a link between two nodes that both answer counts as cut."""

from __future__ import annotations

import pytest

from nesa_node.client.recovery.suspicion import ProbeReport, StallDetector
from nesa_node.swarm.protocol.messages import Pong

EPOCH = 3


def report(
    asked_at: float,
    *,
    step: int,
    pushed: int | None,
    came: int | None = 100,
    busy: bool = False,
    epoch: int = EPOCH,
) -> ProbeReport:
    pong = Pong(nonce=0, epoch=epoch, step=step, busy=busy, pushed=pushed, upstream_bytes=came)
    return ProbeReport(pong, asked_at)


def stalled(
    *pairs: tuple[ProbeReport | None, ProbeReport | None], looks: tuple[float, ...]
) -> object:
    """What the last look at a chain of two finds."""
    stalls = StallDetector()
    for now, (first, second) in zip(looks, pairs, strict=True):
        found = stalls.find_stall([("first", first), ("second", second)], EPOCH, now)
    return found


PUSHED = report(0.0, step=7, pushed=7)


def test_step_that_was_pushed_and_does_not_come_is_a_stall_from_when_that_was_known() -> None:
    waits = report(0.0, step=6, pushed=-1)
    later = report(1.5, step=6, pushed=-1)
    assert stalled((PUSHED, waits), (PUSHED, later), looks=(0.25, 1.75)) == (1, 1.25)


def test_one_answer_is_none_however_long_ago() -> None:
    waits = report(0.0, step=6, pushed=-1)
    assert stalled((PUSHED, waits), (PUSHED, waits), looks=(0.25, 60.0)) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PUSHED, report(1.5, step=7, pushed=-1)),
        (PUSHED, report(1.5, step=6, pushed=-1, came=101)),
        (PUSHED, report(1.5, step=6, pushed=-1, busy=True)),
        (PUSHED, report(1.5, step=6, pushed=-1, epoch=EPOCH - 1)),
        (PUSHED, report(1.5, step=6, pushed=-1, came=None)),
        (report(1.5, step=7, pushed=None), report(1.5, step=6, pushed=None)),
        (report(1.5, step=7, pushed=6), report(1.5, step=6, pushed=-1)),
        (None, report(1.5, step=6, pushed=-1)),
        (PUSHED, None),
    ],
    ids=[
        "it came",
        "some of it came",
        "busy with another",
        "another epoch",
        "does not tell",
        "old nodes",
        "not pushed yet",
        "no report of the first",
        "no report of the second",
    ],
)
def test_what_is_no_stall(first: ProbeReport | None, second: ProbeReport | None) -> None:
    waits = report(0.0, step=6, pushed=-1)
    assert stalled((PUSHED, waits), (first, second), looks=(0.25, 1.75)) is None


def test_bytes_that_come_begin_the_wait_anew() -> None:
    assert stalled(
        (PUSHED, report(0.0, step=6, pushed=-1)),
        (PUSHED, report(1.0, step=6, pushed=-1, came=150)),
        (PUSHED, report(2.0, step=6, pushed=-1, came=150)),
        looks=(0.5, 1.5, 2.5),
    ) == (1, 0.5)


def test_first_of_two_cuts_is_named() -> None:
    stalls, chain = StallDetector(), ["first", "second", "third"]
    for now in (0.25, 1.25):
        reports = [report(now - 0.25, step=7 - place, pushed=7 - place) for place in range(3)]
        found = stalls.find_stall(list(zip(chain, reports, strict=True)), EPOCH, now)
    assert found == (1, 0.75)
