"""How well round trips and rates that nobody measured are guessed from those that somebody did.

On synthetic worlds, on worlds in the regions of a real cloud, on that cloud's own table, and on a
matrix of your own (`--matrix`: an .npz with an array of seconds, [N, N] or [slices, N, N]; zeros
are missing; its first eight slices' medians, the smaller of both directions). Errors are those of
held-out pairs, relative to what they are: their median, in the mean over `--runs` draws.

Legend: N nodes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.low_rank import complete_low_rank, fit_biases
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.ids import PeerId
from nesa_node.topology.geography import locations_array, min_rtt_ms
from nesa_node.topology.links.estimate import estimate_rtt_ms, fit_access_rates
from nesa_node.topology.links.expected_rtt import (
    NUM_DIMENSIONS,
    NetworkCoordinates,
    fit_coordinates,
    fit_heights,
)
from nesa_node.topology.links.matrix import links_from_measurements
from nesa_node.topology.simulation.world import (
    World,
    make_world,
    populate,
    region_coordinates,
)
from nesa_node.topology.tables import load_table

DEFAULTS = Options(nodes=(30, 100, 300, 1000), runs=5)
QUICK = Options(nodes=(30,), runs=1)
SHARES = (0.05, 0.1, 0.2, 0.4)

Floats = NDArray[np.float64]
Method = Callable[[Floats, Floats, np.random.Generator], Floats]


@dataclass(frozen=True, slots=True)
class Case:
    """`places_N2` are NaN where nothing is known; rates are None where the source has none."""

    name: str
    rtt_ms_NN: Floats
    places_N2: Floats
    rate_NN: Floats | None = None


def run(options: Options) -> list[dict[str, Any]]:
    """One row per case, share of measured pairs and method."""
    rows: list[dict[str, Any]] = []
    for case in cases(options):
        for share in SHARES:
            rows += measure(case, share, options)
    show(rows)
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per case and method, a column per share: the median error and the seconds it took."""
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        text = f"{row['median_error']:.1%} ({row['seconds']:.2f} s)"
        cells.setdefault((row["case"], row["method"]), {})[row["share"]] = text
    print_table(
        "Pairs that nobody measured: median relative error",
        "|".join(("case", "method", *(f"{share:.0%} measured" for share in SHARES))),
        [(*key, *(texts[share] for share in SHARES)) for key, texts in cells.items()],
    )


def cases(options: Options) -> Iterator[Case]:
    for count in options.nodes:
        world = make_world(count, 80, np.random.default_rng((options.seed, count)))
        yield _case(f"world {count}", world)
    table = load_table()
    count = max(options.nodes[0], 100)
    rng = np.random.default_rng((options.seed, 1))
    yield _case(f"{table.name} {count}", populate(table.regions, table.rtt_ms_RR, count, 80, rng))
    rtt_ms_RR = table.rtt_ms_RR.copy()
    np.fill_diagonal(rtt_ms_RR, 0.0)
    yield Case(f"{table.name} regions", rtt_ms_RR, region_coordinates(table.regions))
    if options.matrix:
        yield read_matrix(options.matrix)


def _case(name: str, world: World) -> Case:
    locations = [node.location for node in world.snapshot.nodes]
    return Case(
        name, world.links.rtt_ms_NN, locations_array(locations), world.links.rate_bytes_per_s_NN
    )


def read_matrix(path: str, *, last: bool = False) -> Case:
    """Median of the first eight slices of a recording, or of its last eight."""
    with np.load(path) as file:
        seconds = np.asarray(file[file.files[0]], dtype=np.float64)
    chosen = slice(-8, None) if last else slice(8)
    slices = seconds[chosen] if seconds.ndim == 3 else seconds[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # pairs that no slice has
        rtt_ms_NN = 1000.0 * np.nanmedian(np.where(slices > 0, slices, np.nan), axis=0)
    size = len(rtt_ms_NN)
    peers = [PeerId(str(row)) for row in range(size)]
    links = links_from_measurements(peers, rtt_ms_NN, np.zeros((size, size)))
    return Case("matrix", links.rtt_ms_NN, np.full((size, 2), np.nan))


def measure(case: Case, share: float, options: Options) -> list[dict[str, Any]]:
    methods = METHODS if np.isfinite(case.places_N2).all() else WITHOUT_PLACES
    found: dict[str, list[tuple[float, float, float]]] = {}
    for turn in range(options.runs):
        rng = np.random.default_rng((options.seed, turn, int(share * 100)))
        drawn_NN = np.triu(rng.random(case.rtt_ms_NN.shape) < share, 1)
        drawn_NN |= drawn_NN.T
        known_NN = np.isfinite(case.rtt_ms_NN)
        seen_NN = np.where(drawn_NN & known_NN, case.rtt_ms_NN, np.nan)
        held_NN = np.triu(known_NN & ~drawn_NN, 1)
        for name, method in methods.items():
            start = time.perf_counter()
            guess_NN = method(seen_NN, case.places_N2, rng)
            seconds = time.perf_counter() - start
            found.setdefault(name, []).append(
                (*_errors(guess_NN, case.rtt_ms_NN, held_NN), seconds)
            )
        if case.rate_NN is not None:
            found.setdefault("rates", []).append(_rate_errors(case.rate_NN, drawn_NN))
    return [
        {
            "case": case.name,
            "share": share,
            "method": name,
            "median_error": fmean(middle for middle, _, _ in values),
            "p90_error": fmean(p90 for _, p90, _ in values),
            "seconds": fmean(seconds for _, _, seconds in values),
            "runs": [
                {"median_error": middle, "p90_error": p90, "seconds": seconds}
                for middle, p90, seconds in values
            ],
        }
        for name, values in found.items()
    ]


def _errors(guess_NN: Floats, true_NN: Floats, held_NN: NDArray[np.bool_]) -> tuple[float, float]:
    error = np.abs(guess_NN[held_NN] - true_NN[held_NN]) / true_NN[held_NN]
    return float(np.median(error)), float(np.percentile(error, 90))


def _rate_errors(rate_NN: Floats, drawn_NN: NDArray[np.bool_]) -> tuple[float, float, float]:
    start = time.perf_counter()
    guess_NN = fit_access_rates(np.where(drawn_NN, rate_NN, np.nan)).predict_NN()
    seconds = time.perf_counter() - start
    held_NN = ~drawn_NN & np.isfinite(rate_NN) & np.isfinite(guess_NN)
    return (*_errors(guess_NN, rate_NN, held_NN), seconds)


def default(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    return estimate_rtt_ms(rtt_ms_NN, places_N2, rng)


def without_places(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    return estimate_rtt_ms(rtt_ms_NN, np.full_like(places_N2, np.nan), rng)


def half_the_places(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    hidden_N = rng.random(len(places_N2)) < 0.5
    return estimate_rtt_ms(rtt_ms_NN, np.where(hidden_N[:, None], np.nan, places_N2), rng)


def places_alone(rtt_ms_NN: Floats, places_N2: Floats, _: np.random.Generator) -> Floats:
    light_ms_NN = min_rtt_ms(places_N2, places_N2)
    return fit_heights(rtt_ms_NN, light_ms_NN).predict_ms_NN(light_ms_NN)


def vivaldi(rtt_ms_NN: Floats, _: Floats, rng: np.random.Generator) -> Floats:
    size = len(rtt_ms_NN)
    start = NetworkCoordinates(np.zeros((size, NUM_DIMENSIONS)), np.full(size, 10.0), np.ones(size))
    return fit_coordinates(rtt_ms_NN, start, rng).predict_ms_NN()


def low_rank(rtt_ms_NN: Floats, _: Floats, rng: np.random.Generator) -> Floats:
    log_NN = np.log(np.where(rtt_ms_NN > 0, rtt_ms_NN, np.nan))
    base_NN = fit_biases(log_NN)
    completed_NN: Floats = np.exp(base_NN + complete_low_rank(log_NN - base_NN, rng))
    return completed_NN


def vivaldi_low_rank(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    base_NN = np.maximum(vivaldi(rtt_ms_NN, places_N2, rng), 0.1)
    log_NN = np.log(np.where(rtt_ms_NN > 0, rtt_ms_NN, np.nan) / base_NN)
    completed_NN: Floats = base_NN * np.exp(complete_low_rank(log_NN, rng))
    return completed_NN


WITHOUT_PLACES: Mapping[str, Method] = {
    "ours, no places": without_places,
    "vivaldi": vivaldi,
    "low rank": low_rank,
    "vivaldi, low rank": vivaldi_low_rank,
}
METHODS: Mapping[str, Method] = {
    "ours": default,
    "ours, half the places": half_the_places,
    "places alone": places_alone,
    **WITHOUT_PLACES,
}
