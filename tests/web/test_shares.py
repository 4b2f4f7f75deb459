"""How much of a room one key may hold, alone and beside others."""

from __future__ import annotations

import pytest

from nesa_node.web.problem import Problem
from nesa_node.web.shares import Shares


def refused(shares: Shares, caller: str, count: int = 1) -> int:
    held = shares.held
    with pytest.raises(Problem) as problem:
        shares.take(caller, count)
    assert shares.held == held
    assert problem.value.retry_after_s == 3
    return problem.value.status


@pytest.fixture
def shares() -> Shares:
    return Shares(64, "answers", retry_after_s=3)


@pytest.mark.parametrize("caller", ["a", ""])
def test_the_only_caller_may_hold_all(shares: Shares, caller: str) -> None:
    shares.take(caller, 60)
    shares.take(caller, 4)
    assert refused(shares, caller) == (429 if caller else 503)
    shares.give_back(caller, 64)
    with shares.holding(caller, 64):
        assert shares.held == 64
    assert shares.held == 0


def test_a_key_that_holds_all_leaves_room_for_some_that_hold_little(shares: Shares) -> None:
    shares.take("a", 64)
    for caller in "bcde":
        shares.take(caller)
        assert refused(shares, "a") == 429
        shares.take(caller, 3)
        assert refused(shares, caller) == 503
    assert refused(shares, "f") == 503


def test_beside_others_a_key_has_a_quarter_for_sure(shares: Shares) -> None:
    shares.take("a", 64)
    shares.take("b")
    shares.give_back("a", 40)
    assert refused(shares, "a", 8) == 429
    shares.take("b", 15)
    shares.take("c", 16)
    assert refused(shares, "b") == 429


def test_beside_others_a_key_has_more_while_half_is_free(shares: Shares) -> None:
    shares.take("b")
    shares.take("a", 31)
    assert refused(shares, "a") == 429
    shares.take("b", 15)


def test_a_room_of_one_has_a_place_for_a_second_key() -> None:
    shares = Shares(1, "answers", retry_after_s=3)
    shares.take("a")
    shares.take("b")
    assert refused(shares, "c") == 503
