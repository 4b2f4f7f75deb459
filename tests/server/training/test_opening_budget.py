"""What a peer may take of a node to train, with a clock of the test's."""

from __future__ import annotations

import pytest

from nesa_node.core.errors import BusyError
from nesa_node.core.ids import PeerId
from nesa_node.server.training.training_memory import (
    MAX_OPENING_DEBT_S,
    OPENING_PRICE,
    OpeningBudget,
)

PEER, OTHER = PeerId("one"), PeerId("two")


def test_peer_that_opens_without_pause_gets_a_tenth_of_the_time() -> None:
    now, spent_s, opens = 0.0, 0.0, 0
    budget = OpeningBudget(lambda: now)
    while now < 1000:
        try:
            budget.check(PEER)
        except BusyError as error:
            now += max(error.retry_after_s, 0.01)
            continue
        opens += 1
        now, spent_s = now + 0.5, spent_s + 0.5
        budget.charge(PEER, 0.5)
    assert spent_s <= (1000 + MAX_OPENING_DEBT_S) / OPENING_PRICE + 1
    assert opens > 100
    budget.check(OTHER)
    budget.charge(OTHER, MAX_OPENING_DEBT_S)
    with pytest.raises(BusyError, match="too often"):
        budget.check(OTHER)
