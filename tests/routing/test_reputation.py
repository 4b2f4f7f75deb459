from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.ids import PeerId
from nesa_node.routing.reputation import (
    FULL_STANDING_S,
    LONG_STANDING_S,
    MAX_BLAME,
    NEWCOMER_S,
    Accusation,
    aggregate_blame,
    blame_factor,
    blame_penalty_s,
    clamp_uptime_s,
    corroborated_weight,
    long_term_standing,
    reliability,
    reporter_standing,
)

HONEST, FAILED = PeerId("honest"), PeerId("failed")
DAY_S = 86_400.0


def _accuse(reporter: str, peer: PeerId = HONEST, kind: str = "lost", age_s: float = 0.0):  # type: ignore[no-untyped-def]
    return Accusation(PeerId(reporter), peer, kind, age_s)


def _nobody(_: PeerId) -> float:
    return 0.0


accusations = st.lists(
    st.builds(
        Accusation,
        reporter=st.sampled_from([PeerId(f"r{i}") for i in range(30)]),
        peer=st.sampled_from([PeerId(f"p{i}") for i in range(10)] + [PeerId("r0")]),
        kind=st.sampled_from(["lost", "slow", "refused", "stalled", "wrong", "new kind"]),
        age_s=st.floats(-100, 1e4),
    ),
    max_size=60,
)


@given(accusations)
def test_strangers_together_count_as_one_reporter_over_all_whom_they_accuse(
    said: list[Accusation],
) -> None:
    assert sum(aggregate_blame(said, _nobody).values()) <= 1.0 + 1e-9


@given(accusations, st.dictionaries(st.integers(0, 29), st.floats(0, 1)))
def test_blame_is_bounded_by_the_reporters_standing(
    said: list[Accusation], known: dict[int, float]
) -> None:
    standings = {PeerId(f"r{i}"): value for i, value in known.items()}
    found = aggregate_blame(said, lambda peer: standings.get(peer, 0.0))
    assert all(0.0 <= blame <= MAX_BLAME for blame in found.values())
    reporters = {accusation.reporter for accusation in said}
    total = sum(standings.get(reporter, 0.0) for reporter in reporters)
    assert sum(found.values()) <= total + 1.0 + 1e-9


@pytest.mark.parametrize("count", [1, 10, 100, 1000])
def test_sybils_at_most_halve_one_honest_nodes_reliability(count: int) -> None:
    said = [_accuse(f"sybil{i}") for i in range(count)]
    blame = aggregate_blame(said, _nobody)[HONEST]
    before = reliability(DAY_S, 0, 0)
    assert before > 0.99
    assert reliability(DAY_S, 0, 0, blame) >= 0.5 * before
    assert blame_penalty_s(blame) <= 10.0 + 1e-9


def test_hundred_sybils_that_accuse_everybody_hurt_nobody_much() -> None:
    nodes = [PeerId(f"node{i}") for i in range(16)]
    said = [_accuse(f"sybil{i}", node) for i in range(100) for node in nodes]
    for node in nodes:
        assert aggregate_blame(said, _nobody)[node] == pytest.approx(1 / 16)


@given(st.integers(0, 10_000))
def test_no_number_of_known_liars_gets_below_the_floor(count: int) -> None:
    said = [_accuse(f"old{i}") for i in range(min(count, 300))]
    blame = aggregate_blame(said, lambda _: 1.0).get(HONEST, 0.0)
    assert blame_factor(blame) >= 1 / (1 + MAX_BLAME)
    assert reliability(DAY_S, 0, 0, blame) >= 0.99 / (1 + MAX_BLAME)


def test_sybils_do_not_take_the_word_from_those_who_are_known() -> None:
    sybils = [_accuse(f"sybil{i}", PeerId("other")) for i in range(100)]
    said = [_accuse("member", FAILED), *sybils]
    found = aggregate_blame(said, lambda peer: 1.0 if peer == "member" else 0.0)
    assert found[FAILED] == pytest.approx(1.0)


def test_failure_is_seen_by_the_next_chain_at_once_even_from_a_stranger() -> None:
    """A step through a swarm takes tens to hundreds of milliseconds."""
    blame = aggregate_blame([_accuse("client", FAILED)], _nobody)[FAILED]
    assert blame_penalty_s(blame) > 5.0
    # Even while a hundred sybils accuse sixteen honest nodes.
    noise = [_accuse(f"s{i}", PeerId(f"node{j}")) for i in range(100) for j in range(16)]
    amid = aggregate_blame([_accuse("client", FAILED), *noise], _nobody)
    assert blame_penalty_s(amid[FAILED]) > 0.05
    known = aggregate_blame(
        [_accuse("client", FAILED), *noise], lambda p: 1.0 if p == "client" else 0.0
    )
    assert blame_penalty_s(known[FAILED]) > 5.0


def test_blame_fades_and_repetition_by_one_reporter_adds_nothing() -> None:
    def blame(*ages: float) -> float:
        return aggregate_blame([_accuse("r", age_s=age) for age in ages], lambda _: 1.0)[HONEST]

    minute = 60.0
    assert blame(minute) == pytest.approx(blame(0.0) / 2)
    assert blame(20 * minute) < 1e-5
    assert blame(0.0, 0.0, 5.0) == blame(0.0)


def test_nobodys_word_about_himself_counts() -> None:
    assert aggregate_blame([_accuse(HONEST)], lambda _: 1.0) == {}


@given(st.floats(0, 1e8), st.floats(0, 50), st.floats(0, 50), st.floats(0, 9))
def test_reliability_is_a_chance_that_every_ill_lowers(
    uptime_s: float, failures: float, drains: float, blame: float
) -> None:
    value = reliability(uptime_s, failures, drains, blame)
    assert 0.0 <= value <= 1.0
    assert reliability(uptime_s + 3600, failures, drains, blame) >= value
    assert reliability(uptime_s, failures + 1, drains, blame) <= value
    assert reliability(uptime_s, failures, drains + 1, blame) <= value
    assert reliability(uptime_s, failures, drains, blame + 1) <= value


def test_planned_drain_counts_less_than_a_failure() -> None:
    assert reliability(DAY_S, 0, 1) > reliability(DAY_S, 1, 0)


def test_claims_of_uptime_are_believed_to_a_point() -> None:
    assert clamp_uptime_s(100.0, 0.0) == 100.0
    assert clamp_uptime_s(1e9, 0.0) == 3600.0
    assert clamp_uptime_s(1e9, DAY_S) == DAY_S + 3600.0


def test_standing_grows_with_the_time_in_which_a_node_was_known() -> None:
    assert reporter_standing(0.0, 1.0) == reporter_standing(NEWCOMER_S, 1.0) == 0.0
    assert reporter_standing((NEWCOMER_S + FULL_STANDING_S) / 2, 1.0) == 0.5
    assert reporter_standing(1e9, 0.8) == 0.8


def test_word_about_speeds_counts_late_and_needs_a_second_one() -> None:
    assert long_term_standing(FULL_STANDING_S, 1.0) == 0.0
    assert long_term_standing(LONG_STANDING_S, 0.9) == pytest.approx(0.9)
    assert corroborated_weight([]) == corroborated_weight([1.0]) == 0.0
    assert corroborated_weight([1.0, 0.25, 0.5]) == pytest.approx(0.75)


def test_each_of_two_neighbours_that_stall_is_blamed_by_half() -> None:
    def blame(kind: str) -> float:
        return aggregate_blame([_accuse("reporter", kind=kind)], lambda _: 1.0)[HONEST]

    assert blame("lost") == blame("wrong") == 1.0
    assert blame("stalled") == 0.5
    assert blame("slow") == blame("refused") == 0.3
