"""Links estimated from a few measured pairs per node, against the truth of a made-up world."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.arrays import Floats
from nesa_node.topology.geography import locations_array
from nesa_node.topology.links.sparse import SparseLinks, estimate_sparse_links
from nesa_node.topology.simulation.world import make_large_world

WORLD = make_large_world(600, 40, 5)
PEERS = [node.peer_id for node in WORLD.snapshot.nodes]
PLACES_N2 = locations_array([node.location for node in WORLD.snapshot.nodes])
EVERYTHING = np.arange(len(PEERS))
TRUE_NN = WORLD.true_rtt_ms(EVERYTHING[:, None], EVERYTHING[None, :])
APART_NN = ~np.eye(len(PEERS), dtype=bool)


def _fit(places_N2: Floats) -> SparseLinks:
    return estimate_sparse_links(PEERS, places_N2, WORLD.measured, np.random.default_rng(0))


def _error(links: SparseLinks) -> float:
    guess_NN = links.rtt_ms(EVERYTHING, EVERYTHING)
    return float(np.median(np.abs(guess_NN[APART_NN] / TRUE_NN[APART_NN] - 1)))


FITTED = _fit(PLACES_N2)


def test_no_node_measures_more_than_a_record_carries() -> None:
    ends = np.concatenate((WORLD.measured.first_E, WORLD.measured.second_E))
    assert np.bincount(ends, minlength=len(PEERS)).mean() <= 16
    assert (WORLD.measured.first_E < WORLD.measured.second_E).all()


def test_pairs_that_were_not_measured_are_estimated() -> None:
    assert _error(FITTED) < 0.08


def test_places_are_not_needed() -> None:
    assert _error(_fit(np.full_like(PLACES_N2, np.nan))) < 0.2


def test_false_places_are_ignored() -> None:
    """A tenth of the nodes claims to be at the South Pole."""
    claimed_N2 = PLACES_N2.copy()
    claimed_N2[::10] = (-89.0, 0.0)
    guess_NN = _fit(claimed_N2).rtt_ms(EVERYTHING[::10], EVERYTHING)
    true_NN = TRUE_NN[::10]
    wrong_NN = np.abs(guess_NN[true_NN > 0] / true_NN[true_NN > 0] - 1)
    assert np.median(wrong_NN) < 0.25


def test_links_of_a_few_nodes_are_those_of_all() -> None:
    rows = np.array([7, 500, 33])
    links = FITTED.select(rows)
    whole_NN = FITTED.rtt_ms(EVERYTHING, EVERYTHING)
    assert links.peers == tuple(PEERS[row] for row in rows)
    assert np.allclose(links.rtt_ms_NN, whole_NN[np.ix_(rows, rows)])
    assert np.array_equal(links.rtt_ms_NN, links.rtt_ms_NN.T)
    again = FITTED.restrict(rows).select(np.arange(3))
    assert np.allclose(again.rtt_ms_NN, links.rtt_ms_NN)
    assert np.array_equal(again.rate_bytes_per_s_NN, links.rate_bytes_per_s_NN)


def test_rates_are_those_of_access_links() -> None:
    up_N = WORLD.access_N.up_bytes_per_s_A
    wrong_N = np.abs(FITTED.rates.up_N / up_N - 1)
    assert np.median(wrong_N[WORLD.access_N.residential_A]) < 0.25


@pytest.mark.parametrize("client", range(4))
def test_a_client_expects_what_it_has_not_measured(client: int) -> None:
    true_N, rows = WORLD.client_rtt_ms_CN[client], WORLD.client_pings_CA[client]
    expected_N = FITTED.expect_from(rows, true_N[rows])
    assert np.array_equal(expected_N[rows], true_N[rows])
    assert np.median(np.abs(expected_N / true_N - 1)) < 0.12
    near = np.argsort(expected_N)[:10]
    assert true_N[near].mean() < np.quantile(true_N, 0.2)


def test_true_links_are_the_same_whenever_they_are_asked_for() -> None:
    assert np.array_equal(TRUE_NN, TRUE_NN.T)
    assert (np.diag(TRUE_NN) == 0).all()
    assert (TRUE_NN[APART_NN] > 0).all()
    some = np.array([3, 9, 400])
    assert np.array_equal(
        WORLD.true_rtt_ms(some[:, None], some[None, :]), TRUE_NN[np.ix_(some, some)]
    )
    other = replace(WORLD, seed=WORLD.seed + 1)
    assert not np.array_equal(other.true_rtt_ms(some[:1], some[1:2]), TRUE_NN[3:4, 9])
    # The noise is that of `World`: 4 % of the way between exchanges, and 2 % detours.
    access_N = WORLD.access_N.rtt_ms_A
    between_NN = WORLD.region_rtt_ms_RR[np.ix_(WORLD.region_N, WORLD.region_N)]
    log = np.log((TRUE_NN - access_N - access_N[:, None])[APART_NN] / between_NN[APART_NN])
    assert np.mean(log > 0.25) == pytest.approx(0.02, abs=0.004)
    assert np.std(log[np.abs(log) < 0.2]) == pytest.approx(0.04, abs=0.004)
