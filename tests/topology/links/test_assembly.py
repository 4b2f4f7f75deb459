import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import (
    CONFIDENCE_HALF_LIFE_S,
    MAX_AGE_DIFFERENCE_S,
    links_from_measurements,
    symmetrize_measurements,
)

PEERS = tuple(PeerId(name) for name in "abcd")
ANY = arrays(np.float64, (4, 4), elements=st.floats(allow_nan=True, allow_infinity=True, width=64))


def _nothing() -> Floats:
    return np.full((4, 4), np.nan)


def test_smaller_of_both_ends_counts() -> None:
    rtt_NN = _nothing()
    rtt_NN[0, 1], rtt_NN[1, 0], rtt_NN[2, 0] = 30.0, 50.0, 70.0
    got_NN, age_NN, ends_NN = symmetrize_measurements(
        rtt_NN, np.where(np.isnan(rtt_NN), np.nan, 5.0)
    )
    assert got_NN[0, 1] == got_NN[1, 0] == 30.0
    assert got_NN[0, 2] == got_NN[2, 0] == 70.0
    assert np.isnan(got_NN[3, 0])
    assert ends_NN[0, 1] == 2
    assert ends_NN[0, 2] == 1
    assert age_NN[0, 1] == 5.0


def test_what_is_stale_does_not_hide_what_has_become_slower() -> None:
    rtt_NN, age_NN = _nothing(), _nothing()
    rtt_NN[0, 1], rtt_NN[1, 0] = 30.0, 110.0
    age_NN[0, 1], age_NN[1, 0] = MAX_AGE_DIFFERENCE_S + 20.0, 10.0
    got_NN, got_age_NN, ends_NN = symmetrize_measurements(rtt_NN, age_NN)
    assert got_NN[0, 1] == 110.0
    assert got_age_NN[0, 1] == 10.0
    assert ends_NN[0, 1] == 1


def test_node_that_flatters_itself_is_not_asked() -> None:
    rtt_NN = np.full((4, 4), 100.0)
    rtt_NN[0, 1:] = 1.0
    got_NN, _, _ = symmetrize_measurements(rtt_NN, np.zeros((4, 4)))
    assert (got_NN[0, 1:] == 100.0).all()
    # Its victims, of whom it claims so much, are not taken for liars.
    assert (got_NN[1, 2:] == 100.0).all()


def test_confidence_falls_with_age_and_with_silence_of_one_end() -> None:
    rtt_NN, age_NN = np.full((4, 4), 50.0), np.zeros((4, 4))
    age_NN[0, 2] = age_NN[2, 0] = CONFIDENCE_HALF_LIFE_S
    rtt_NN[3, 0] = np.nan
    rtt_NN[3, 1] = rtt_NN[1, 3] = np.nan
    confidence_NN = links_from_measurements(PEERS, rtt_NN, age_NN).confidence_NN
    assert confidence_NN[0, 1] == 1.0
    assert confidence_NN[0, 2] == pytest.approx(0.5)
    assert 0 < confidence_NN[0, 3] < 1
    assert confidence_NN[1, 3] == 0.0


@given(ANY, ANY, ANY)
def test_links_hold_nothing_absurd(rtt: Floats, age: Floats, rate: Floats) -> None:
    links = links_from_measurements(PEERS, rtt, age, rate)
    known_NN = ~np.isnan(links.rtt_ms_NN)
    assert np.array_equal(links.rtt_ms_NN, links.rtt_ms_NN.T, equal_nan=True)
    assert ((links.rtt_ms_NN >= 0) & (links.rtt_ms_NN <= 60_000))[known_NN].all()
    assert ((links.confidence_NN >= 0) & (links.confidence_NN <= 1)).all()
    assert not (links.rate_bytes_per_s_NN <= 0).any()
