from __future__ import annotations

import math

from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p.link_measurements import LinkSpeed, LinkSpeeds


def test_rate_is_unknown_before_the_first_report() -> None:
    assert LinkSpeed().rate_bytes_per_s is None


def test_reports_of_a_receiver_that_was_busy_do_not_count() -> None:
    speed = LinkSpeed()
    for seconds in (0.1, 5.0, 0.3, 0.1, 1e-4):
        speed.record_report(1_000_000, seconds)
    assert speed.rate_bytes_per_s == 1e7


def test_small_messages_do_not_count_beside_large_ones() -> None:
    speed = LinkSpeed()
    speed.record_report(1_000_000, 1.0)
    speed.record_report(100_000, 0.001)
    assert speed.rate_bytes_per_s == 1e6


def test_a_link_that_became_slower_is_noticed() -> None:
    speed = LinkSpeed()
    for seconds in (0.1,) * 20 + (1.0,) * 6:
        speed.record_report(1_000_000, seconds)
    assert speed.rate_bytes_per_s == 1e6


def test_small_messages_tell_that_a_link_became_slower() -> None:
    speed = LinkSpeed()
    for _ in range(6):
        speed.record_report(2_000_000, 0.02)
    speed.record_report(65_536, 0.008)
    assert speed.rate_bytes_per_s == 1e8
    speed.record_report(65_536, 0.008)
    assert speed.rate_bytes_per_s == 65_536 / 0.008


def test_one_slow_report_between_others_changes_nothing() -> None:
    speed = LinkSpeed()
    for _ in range(9):
        speed.record_report(1_000_000, 0.1)
        speed.record_report(1_000_000, 1.0)
        assert speed.rate_bytes_per_s == 1e7


def test_impossible_reports_are_ignored() -> None:
    speed = LinkSpeed()
    speed.record_report(0, 1.0)
    speed.record_report(10, 0.0)
    assert speed.rate_bytes_per_s is None


def test_peers_are_forgotten_in_the_order_in_which_they_were_last_used() -> None:
    speeds = LinkSpeeds()
    speeds.link_to(PeerId("first")).record_report(10, 1.0)
    for number in range(1023):
        speeds.link_to(PeerId(str(number)))
    assert speeds.link_to(PeerId("first")).rate_bytes_per_s == 10.0
    speeds.link_to(PeerId("one more"))
    assert speeds.link_to(PeerId("first")).rate_bytes_per_s == 10.0
    assert len(speeds._speeds) == 1024


def test_a_peer_on_this_machine_is_not_waited_for() -> None:
    speed = LinkSpeed()
    speed.is_local = True
    speed.record_report(1_000_000, 100.0)
    assert speed.rate_bytes_per_s == math.inf


def test_old_reports_do_not_count_and_a_link_of_which_nothing_is_known_is_due() -> None:
    now = [0.0]
    speed = LinkSpeed(lambda: now[0])
    due = [speed.needs_probe]
    speed.record_report(1_000_000, 0.01)
    due.append(speed.needs_probe)
    now[0] = 301.0
    due.append(speed.needs_probe)
    speed.record_report(1_000_000, 1.0)
    assert speed.rate_bytes_per_s == 1e6
    assert [*due, speed.needs_probe] == [True, False, True, False]


def test_a_peer_on_this_machine_is_never_probed() -> None:
    speed = LinkSpeed()
    speed.is_local = True
    assert not speed.needs_probe
