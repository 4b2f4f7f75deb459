"""How much of a room one key may hold, alone and beside others."""

from __future__ import annotations

import pytest

from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import FairSlots


def refused(shares: FairSlots, caller: str, count: int = 1) -> int:
    held = shares.held
    with pytest.raises(HttpProblem) as problem:
        shares.acquire(caller, count)
    assert shares.held == held
    assert problem.value.retry_after_s == 3
    return problem.value.status


@pytest.fixture
def shares() -> FairSlots:
    return FairSlots(64, "answers", retry_after_s=3)


@pytest.mark.parametrize("caller", ["a", ""])
def test_the_only_caller_may_hold_all(shares: FairSlots, caller: str) -> None:
    shares.acquire(caller, 60)
    shares.acquire(caller, 4)
    assert refused(shares, caller) == (429 if caller else 503)
    shares.release(caller, 64)
    with shares.hold(caller, 64):
        assert shares.held == 64
    assert shares.held == 0


def test_a_key_that_holds_all_leaves_room_for_some_that_hold_little(shares: FairSlots) -> None:
    shares.acquire("a", 64)
    for caller in "bcde":
        shares.acquire(caller)
        assert refused(shares, "a") == 429
        shares.acquire(caller, 3)
        assert refused(shares, caller) == 503
    assert refused(shares, "f") == 503


def test_beside_others_a_key_has_a_quarter_for_sure(shares: FairSlots) -> None:
    shares.acquire("a", 64)
    shares.acquire("b")
    shares.release("a", 40)
    assert refused(shares, "a", 8) == 429
    shares.acquire("b", 15)
    shares.acquire("c", 16)
    assert refused(shares, "b") == 429


def test_beside_others_a_key_has_more_while_half_is_free(shares: FairSlots) -> None:
    shares.acquire("b")
    shares.acquire("a", 31)
    assert refused(shares, "a") == 429
    shares.acquire("b", 15)


def test_a_room_of_one_has_a_place_for_a_second_key() -> None:
    shares = FairSlots(1, "answers", retry_after_s=3)
    shares.acquire("a")
    shares.acquire("b")
    assert refused(shares, "c") == 503
