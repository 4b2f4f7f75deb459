"""Wrong keys per address, and the memory that they may take."""

from __future__ import annotations

import tracemalloc

from nesa_node.web.rate_limits import MAX_TRACKED_ADDRESSES, WRONG_KEYS_PER_MINUTE, WrongKeyThrottle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_some_are_free_and_then_it_waits_a_few_seconds_for_each() -> None:
    clock = Clock()
    wrong = WrongKeyThrottle(clock)
    for _ in range(WRONG_KEYS_PER_MINUTE):
        assert wrong.wait_s("192.0.2.1") == 0
        wrong.record_failure("192.0.2.1")
    assert wrong.wait_s("192.0.2.1") == 60 / WRONG_KEYS_PER_MINUTE
    assert wrong.wait_s("192.0.2.2") == 0
    clock.now += 60 / WRONG_KEYS_PER_MINUTE
    assert wrong.wait_s("192.0.2.1") == 0
    wrong.record_failure("192.0.2.1")
    assert wrong.wait_s("192.0.2.1") > 0


def test_an_hour_of_guessing_is_a_thousand_guesses() -> None:
    clock = Clock()
    wrong = WrongKeyThrottle(clock)
    guesses = 0
    for _ in range(3600 * 4):
        if not wrong.wait_s("192.0.2.1"):
            wrong.record_failure("192.0.2.1")
            guesses += 1
        clock.now += 0.25
    assert guesses <= WRONG_KEYS_PER_MINUTE * 61


def test_addresses_of_one_network_count_as_one_and_mapped_ones_as_what_they_are() -> None:
    wrong = WrongKeyThrottle(Clock())
    for number in range(WRONG_KEYS_PER_MINUTE):
        wrong.record_failure(f"2001:db8::{number:x}:1")
    assert wrong.wait_s("2001:db8::ffff") > 0
    assert wrong.wait_s("2001:db8:0:1::1") == 0
    for _ in range(WRONG_KEYS_PER_MINUTE):
        wrong.record_failure("::ffff:192.0.2.1")
    assert wrong.wait_s("192.0.2.1") > 0
    assert len(wrong) == 2


def test_what_is_no_address_is_counted_by_its_text() -> None:
    wrong = WrongKeyThrottle(Clock())
    for _ in range(WRONG_KEYS_PER_MINUTE):
        wrong.record_failure("")
    assert wrong.wait_s("") > 0


def test_ten_thousand_wrong_keys_from_as_many_addresses_take_little_memory() -> None:
    clock = Clock()
    wrong = WrongKeyThrottle(clock)
    tracemalloc.start()
    for number in range(MAX_TRACKED_ADDRESSES + 10_000):
        clock.now += 0.001
        wrong.record_failure(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(wrong) == MAX_TRACKED_ADDRESSES
    assert taken < 2_000_000


def test_a_full_table_forgets_who_has_been_quiet_and_not_who_guesses() -> None:
    wrong = WrongKeyThrottle(Clock())
    for number in range(MAX_TRACKED_ADDRESSES):
        wrong.record_failure(f"10.0.{number >> 8}.{number & 255}")
    for _ in range(WRONG_KEYS_PER_MINUTE):
        wrong.record_failure("192.0.2.1")
    assert wrong.wait_s("192.0.2.1") > 0
    assert len(wrong) == MAX_TRACKED_ADDRESSES
