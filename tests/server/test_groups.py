"""Sessions that decode through a chain travel together, and prefills keep out of their way."""

from __future__ import annotations

import itertools
import random
from statistics import mean, median

import pytest

from tests.server.simulated_chain import Chain


def waits(chain: Chain, since: float, until: float) -> list[float]:
    """Between tokens of any session."""
    return sorted(
        after - before
        for times in chain.arrivals.values()
        for before, after in itertools.pairwise(times)
        if since <= before and after <= until
    )


SETTLED_S = 8.0
"""Both numbers of groups have been tried, and one is in use."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sessions", [4, 6, 8, 16])
def test_sessions_gather_in_two_groups_and_stay_together(sessions: int, seed: int) -> None:
    chain = Chain()
    chain.decode(sessions, random.Random(seed))
    chain.run(SETTLED_S)
    for node in chain.nodes:
        assert mean(node.rows[-20:]) == pytest.approx(sessions / 2, rel=0.05)
    cycle_s = 3 * chain.takes(sessions // 2) + chain.client_s
    spread_s = 4 * sessions / 2 * chain.message_s
    assert waits(chain, chain.now - 2, chain.now)[-1] < cycle_s + 2 * spread_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sessions", [3, 4, 8, 16])
def test_nodes_that_share_one_processor_run_all_sessions_at_once(sessions: int, seed: int) -> None:
    chain = Chain(processors=1)
    chain.decode(sessions, random.Random(seed))
    chain.run(SETTLED_S)
    for node in chain.nodes:
        assert mean(node.rows[-20:]) == pytest.approx(sessions, rel=0.05)
    cycle_s = 3 * chain.takes(sessions) + chain.client_s
    spread_s = 4 * sessions * chain.message_s
    assert waits(chain, chain.now - 2, chain.now)[-1] < cycle_s + 2 * spread_s


def test_one_session_or_two_never_wait() -> None:
    for sessions in (1, 2):
        chain = Chain()
        chain.decode(sessions, random.Random(0))
        chain.run(5)
        alone_s = 3 * chain.step_s + 4 * chain.message_s + chain.client_s
        assert median(waits(chain, 101, 105)) == pytest.approx(alone_s, rel=0.05)


def test_those_who_remain_do_not_wait_for_those_who_went() -> None:
    chain = Chain()
    chain.decode(12, random.Random(0))
    chain.run(3)
    before = median(waits(chain, 102, 103))
    for number in range(9):
        chain.end(f"session {number}")
    chain.run(0.2)
    start = chain.now
    chain.run(2)
    assert median(waits(chain, start, chain.now)) < before
    assert waits(chain, start, chain.now)[-1] < 2 * before


@pytest.mark.parametrize("token_s", [0.0011, 0.0003])
@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_a_long_prefill_keeps_out_of_the_way_and_gets_on(sessions: int, token_s: float) -> None:
    chain = Chain(token_s=token_s)
    chain.decode(sessions, random.Random(0))
    chain.run(5)
    calm = median(waits(chain, 103, 105))
    chain.prefill("prefill", 2000)
    chain.run(20)
    done = chain.prefilled_at["prefill"]
    disturbed = waits(chain, 105, done)
    assert disturbed[int(0.99 * len(disturbed))] < 2.5 * calm
    assert done - 105 < 5 * 2000 * token_s
