import numpy as np
import pytest

from benchmarks.low_rank import complete_low_rank, fit_biases
from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId
from nesa_node.topology.geography import drop_implausible, locations_array, min_rtt_ms
from nesa_node.topology.links.estimate import (
    ESTIMATE_CONFIDENCE,
    estimate_rtt_ms,
    fill_links,
    fit_access_rates,
    places_predict_better,
)
from nesa_node.topology.links.expected_rtt import fit_heights
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.world import World, make_world, region_coordinates
from nesa_node.topology.tables import load_table

WORLD = make_world(80, 80, np.random.default_rng(7))
PLACES_N2 = locations_array([node.location for node in WORLD.snapshot.nodes])


def _hide(world: World, share: float, seed: int = 0) -> Links:
    """The links of a world of which only `share` were measured."""
    rng = np.random.default_rng(seed)
    links = world.links
    seen_NN = np.triu(rng.random(links.rtt_ms_NN.shape) < share, 1)
    seen_NN |= seen_NN.T | np.eye(len(seen_NN), dtype=bool)
    return Links(
        links.peers,
        np.where(seen_NN, links.rtt_ms_NN, np.nan),
        np.where(seen_NN, links.rate_bytes_per_s_NN, np.nan),
        np.where(seen_NN, 0.0, np.nan),
        np.where(seen_NN, 1.0, 0.0),
    )


def _median_error(guess_NN: Floats, seen_NN: Floats, true_NN: Floats) -> float:
    held_NN = np.isnan(seen_NN)
    return float(np.median(np.abs(guess_NN[held_NN] / true_NN[held_NN] - 1.0)))


@pytest.mark.parametrize(("share", "most"), [(0.05, 0.12), (0.2, 0.06)])
def test_hidden_pairs_are_guessed_where_places_are_known(share: float, most: float) -> None:
    seen = _hide(WORLD, share)
    guess_NN = estimate_rtt_ms(seen.rtt_ms_NN, PLACES_N2, np.random.default_rng(0))
    assert _median_error(guess_NN, seen.rtt_ms_NN, WORLD.links.rtt_ms_NN) < most


def test_hidden_pairs_are_guessed_without_places() -> None:
    seen = _hide(WORLD, 0.3)
    nowhere_N2 = np.full_like(PLACES_N2, np.nan)
    guess_NN = estimate_rtt_ms(seen.rtt_ms_NN, nowhere_N2, np.random.default_rng(0))
    assert _median_error(guess_NN, seen.rtt_ms_NN, WORLD.links.rtt_ms_NN) < 0.16


def test_measured_pairs_are_left_alone_and_nothing_is_unknown() -> None:
    seen = _hide(WORLD, 0.1)
    half = [None if row % 2 else node.location for row, node in enumerate(WORLD.snapshot.nodes)]
    filled = fill_links(seen, half, np.random.default_rng(0))
    measured_NN = np.isfinite(seen.rtt_ms_NN)
    assert np.array_equal(filled.rtt_ms_NN[measured_NN], seen.rtt_ms_NN[measured_NN])
    assert np.isfinite(filled.rtt_ms_NN).all()
    assert np.array_equal(filled.rtt_ms_NN, filled.rtt_ms_NN.T)
    assert (filled.rtt_ms_NN[~np.eye(80, dtype=bool)] > 0).all()
    assert (np.diag(filled.rtt_ms_NN) == 0).all()
    assert (filled.confidence_NN[measured_NN] == 1.0).all()
    assert (filled.confidence_NN[~measured_NN] <= ESTIMATE_CONFIDENCE).all()
    assert np.isnan(filled.age_s_NN[~measured_NN]).all()


def test_no_estimate_outruns_light() -> None:
    seen = _hide(WORLD, 0.05)
    guess_NN = estimate_rtt_ms(seen.rtt_ms_NN, PLACES_N2, np.random.default_rng(0))
    held_NN = np.isnan(seen.rtt_ms_NN)
    assert (guess_NN >= min_rtt_ms(PLACES_N2, PLACES_N2) - 1e-9)[held_NN].all()


def test_coordinates_are_used_where_routes_have_little_to_do_with_places() -> None:
    """As in a cloud all of whose regions are known, but one lies behind an ocean of detours."""
    table = load_table()
    rtt_NN = np.where(np.eye(20, dtype=bool), 0.0, table.rtt_ms_RR)
    places_N2 = region_coordinates(table.regions)
    rng = np.random.default_rng(0)
    drawn_NN = np.triu(rng.random((20, 20)) < 0.5, 1) | np.eye(20, dtype=bool)
    seen_NN: Floats = np.where(drawn_NN | drawn_NN.T, rtt_NN, np.nan)
    assert not places_predict_better(seen_NN, places_N2, rng)
    assert places_predict_better(_hide(WORLD, 0.3).rtt_ms_NN, PLACES_N2, rng)
    guess_NN = estimate_rtt_ms(seen_NN, places_N2, rng)
    assert _median_error(guess_NN, seen_NN, rtt_NN) < 0.06
    assert (guess_NN >= min_rtt_ms(places_N2, places_N2) - 1e-3).all()


def test_same_generator_gives_the_same_estimates() -> None:
    seen = _hide(WORLD, 0.1)
    nowhere = [None] * 80
    one, other = (fill_links(seen, nowhere, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(one.rtt_ms_NN, other.rtt_ms_NN)


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_nothing_measured_is_still_filled(size: int) -> None:
    links = Links.unknown([PeerId(str(row)) for row in range(size)])
    for locations in ([None] * size, [(10.0 * row, 5.0) for row in range(size)]):
        filled = fill_links(links, locations, np.random.default_rng(0))
        assert np.isfinite(filled.rtt_ms_NN).all()
        assert (filled.confidence_NN[~np.eye(size, dtype=bool)] == 0).all()


def test_place_that_light_contradicts_is_not_believed() -> None:
    places_N2 = PLACES_N2.copy()
    liar = int(np.argmin(np.median(WORLD.links.rtt_ms_NN, axis=1)))
    latitude, longitude = places_N2[liar]
    places_N2[liar] = -latitude, longitude + (180 if longitude < 0 else -180)
    kept_N2 = drop_implausible(places_N2, WORLD.links.rtt_ms_NN)
    assert np.isnan(kept_N2[liar]).all()
    others = np.arange(80) != liar
    assert np.array_equal(kept_N2[others], places_N2[others])


def test_nonsense_is_no_place() -> None:
    array_N2 = locations_array(
        [(91.0, 0.0), (0.0, -181.0), None, (float("nan"), 0.0), (45.0, 90.0)]
    )
    assert np.isnan(array_N2[:4]).all()
    assert array_N2[4].tolist() == [45.0, 90.0]
    assert locations_array([]).shape == (0, 2)


def test_heights_and_stretch_are_found_despite_detours() -> None:
    rng = np.random.default_rng(0)
    light_NN = min_rtt_ms(PLACES_N2, PLACES_N2)
    height_N = rng.uniform(2, 30, 80)
    rtt_NN = 1.8 * light_NN + height_N[:, None] + height_N[None, :]
    detour_NN = np.triu(rng.random((80, 80)) < 0.05, 1)
    rtt_NN[detour_NN | detour_NN.T] *= 2
    fit = fit_heights(rtt_NN, light_NN)
    assert fit.stretch == pytest.approx(1.8, rel=0.02)
    assert np.abs(fit.height_ms_N - height_N).max() < 2.0


def test_access_links_are_found_from_rates() -> None:
    rng = np.random.default_rng(0)
    up_N, down_N = rng.uniform(1, 5, 50), rng.uniform(10, 50, 50)
    rate_NN = np.minimum(up_N[:, None], down_N[None, :])
    seen_NN = np.where(rng.random((50, 50)) < 0.2, rate_NN, np.nan)
    np.fill_diagonal(rate_NN, 1.0)
    np.fill_diagonal(seen_NN, np.inf)
    assert np.allclose(fit_access_rates(seen_NN).up_N, up_N)
    guess_NN = fit_access_rates(seen_NN).predict_NN()
    assert np.isinf(np.diag(guess_NN)).all()
    off = ~np.eye(50, dtype=bool)
    assert np.median(np.abs(guess_NN / rate_NN - 1.0)[off]) < 0.01


def test_rates_of_a_world_are_guessed() -> None:
    seen = _hide(WORLD, 0.2)
    filled = fill_links(seen, [None] * 80, np.random.default_rng(0))
    known = WORLD.links.rate_bytes_per_s_NN
    assert _median_error(filled.rate_bytes_per_s_NN, seen.rate_bytes_per_s_NN, known) < 0.12


def test_rates_that_nobody_has_an_idea_of_stay_unknown() -> None:
    filled = fill_links(
        Links.unknown([PeerId("a"), PeerId("b")]), [None] * 2, np.random.default_rng(0)
    )
    assert np.isnan(filled.rate_bytes_per_s_NN[0, 1])


def test_low_rank_matrix_is_completed() -> None:
    rng = np.random.default_rng(0)
    factor_NK = rng.normal(size=(60, 2))
    full_NN = factor_NK @ factor_NK.T
    seen_NN = np.where(rng.random((60, 60)) < 0.4, full_NN, np.nan)
    seen_NN = np.where(np.isnan(seen_NN), seen_NN.T, seen_NN)
    guess_NN = complete_low_rank(seen_NN, rng, rank=2, ridge=0.1)
    assert np.abs(guess_NN - full_NN).mean() < 0.1


def test_biases_find_row_and_column_offsets() -> None:
    offset_N = np.array([0.0, 1.0, 2.0, -3.0])
    values_NN = 5.0 + offset_N[:, None] + offset_N[None, :]
    assert np.abs(fit_biases(values_NN, ridge=1e-9, turns=100) - values_NN).max() < 0.01
