"""Locations on the globe, and the lower bound of the round trip between them.

Legend: A and B points each, N nodes. Locations are latitude and longitude in degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nesa_node.core.arrays import Bools, Floats

EARTH_RADIUS_KM = 6371.0
FIBRE_KM_PER_RTT_MS = 100.0
"""Light in glass travels 200 km in a millisecond, and a round trip covers the distance twice."""


@dataclass(frozen=True, slots=True)
class Region:
    """A named region, with its centre in degrees."""

    name: str
    latitude: float
    longitude: float


CITIES = (
    Region("new-york", 40.71, -74.01),
    Region("frankfurt", 50.11, 8.68),
    Region("san-francisco", 37.77, -122.42),
    Region("singapore", 1.35, 103.82),
    Region("london", 51.51, -0.13),
    Region("tokyo", 35.68, 139.69),
    Region("sao-paulo", -23.55, -46.63),
    Region("mumbai", 19.08, 72.88),
    Region("sydney", -33.87, 151.21),
    Region("chicago", 41.88, -87.63),
    Region("paris", 48.86, 2.35),
    Region("seoul", 37.57, 126.98),
    Region("toronto", 43.65, -79.38),
    Region("warsaw", 52.23, 21.01),
    Region("dallas", 32.78, -96.80),
    Region("stockholm", 59.33, 18.07),
    Region("johannesburg", -26.20, 28.05),
    Region("hong-kong", 22.32, 114.17),
    Region("madrid", 40.42, -3.70),
    Region("dubai", 25.20, 55.27),
)
"""Regions of synthetic swarms: coordinates of cities, to a hundredth of a degree."""


def great_circle_km(a_A2: ArrayLike, b_B2: ArrayLike) -> Floats:
    """Great-circle distances in km, [A, B]; NaN where a location is unknown."""
    cosines_AB = unit_vectors(a_A2) @ unit_vectors(b_B2).T
    np.clip(cosines_AB, -1.0, 1.0, out=cosines_AB)
    np.arccos(cosines_AB, out=cosines_AB)
    cosines_AB *= EARTH_RADIUS_KM
    return cosines_AB


def min_rtt_ms(a_A2: ArrayLike, b_B2: ArrayLike) -> Floats:
    """Round trips in ms through a straight fibre, [A, B]: a lower bound of real ones."""
    return great_circle_km(a_A2, b_B2) / FIBRE_KM_PER_RTT_MS


def unit_vectors(places_A2: ArrayLike) -> Floats:
    """Locations as points of the unit sphere, [A, 3]."""
    degrees_A2 = np.asarray(places_A2, dtype=np.float64).reshape(-1, 2)
    latitude_A, longitude_A = np.radians(degrees_A2).T
    flat_A = np.cos(latitude_A)
    return np.column_stack(
        (flat_A * np.cos(longitude_A), flat_A * np.sin(longitude_A), np.sin(latitude_A))
    )


def locations_array(locations: Sequence[tuple[float, float] | None]) -> Floats:
    """Locations in degrees, [N, 2]; NaN where missing or not on the globe."""
    places_N2 = np.array([place or (np.nan, np.nan) for place in locations], dtype=np.float64)
    places_N2 = places_N2.reshape(-1, 2)
    nonsense_N = ~((np.abs(places_N2[:, 0]) <= 90) & (np.abs(places_N2[:, 1]) <= 180))
    places_N2[nonsense_N] = np.nan
    return places_N2


def drop_implausible(places_N2: Floats, rtt_ms_NN: Floats) -> Floats:
    """`places_N2`, with NaN for places from which most measured round trips would outrun light.

    The node with the largest share of contradictions is removed first, and shares are recomputed:
    peers with true locations contradict only the false ones.
    """
    kept_N2 = places_N2.copy()
    with np.errstate(invalid="ignore"):
        outrun_NN = rtt_ms_NN < 0.9 * min_rtt_ms(places_N2, places_N2)
    np.fill_diagonal(outrun_NN, False)
    measured_NN: Bools = np.isfinite(rtt_ms_NN)
    while True:
        placed_N: Bools = np.logical_and(*np.isfinite(kept_N2).T)
        outrun_NN &= placed_N[:, None] & placed_N[None, :]
        judged_N = (measured_NN & placed_N[None, :]).sum(axis=1) - 1
        share_N = outrun_NN.sum(axis=1) / np.maximum(judged_N, 1)
        worst = int(np.argmax(share_N)) if len(share_N) else 0
        if not len(share_N) or share_N[worst] <= 0.5:
            return kept_N2
        kept_N2[worst] = np.nan
