import pytest

from nesa_node.core.ids import PeerId
from nesa_node.routing.reputation import FailurePenalties

PEER = PeerId("p")


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_peer_that_never_failed_costs_nothing() -> None:
    assert FailurePenalties(_Clock()).penalty_s(PEER) == 0.0


def test_penalty_halves_with_time_and_ends() -> None:
    clock = _Clock()
    avoidance = FailurePenalties(clock, half_life_s=10.0, failure_s=8.0)
    avoidance.record_failure(PEER)
    assert avoidance.penalty_s(PEER) == pytest.approx(8.0)
    clock.now += 20
    assert avoidance.penalty_s(PEER) == pytest.approx(2.0)
    clock.now += 1000
    assert avoidance.penalty_s(PEER) == 0.0


def test_failures_add_up_to_a_limit() -> None:
    avoidance = FailurePenalties(_Clock(), failure_s=10.0, max_penalty_s=25.0)
    for expected in (10.0, 20.0, 25.0, 25.0):
        avoidance.record_failure(PEER)
        assert avoidance.penalty_s(PEER) == pytest.approx(expected)


def test_memory_is_bounded_and_keeps_the_worst() -> None:
    avoidance = FailurePenalties(_Clock())
    avoidance.record_failure(PEER)
    avoidance.record_failure(PEER)
    for index in range(5000):
        avoidance.record_failure(PeerId(f"q{index}"))
    assert avoidance.penalty_s(PEER) == pytest.approx(20.0)
    assert sum(avoidance.penalty_s(PeerId(f"q{index}")) > 0 for index in range(5000)) <= 4096


def test_half_life_must_be_positive() -> None:
    with pytest.raises(ValueError, match="half_life_s"):
        FailurePenalties(_Clock(), half_life_s=0)


def test_a_peer_may_be_forgotten_while_its_penalty_is_computed() -> None:
    """Planners run in threads beside the event loop, which forgets the smallest penalties."""
    at_s = [0.0]

    def clock() -> float:
        if at_s[0] > 0:
            avoidance._penalties.pop(PEER, None)
        return at_s[0]

    avoidance = FailurePenalties(clock)
    avoidance.record_failure(PEER)
    at_s[0] = 1e6
    assert avoidance.penalty_s(PEER) == 0.0
