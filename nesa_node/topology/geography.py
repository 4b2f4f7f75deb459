"""Locations on the globe, and the lower bound of the round trip between them.

Legend: A and B points each. Locations are latitude and longitude in degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

EARTH_RADIUS_KM = 6371.0
KM_PER_MS_OF_ROUND_TRIP = 100.0
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


def least_rtt_ms(a_A2: ArrayLike, b_B2: ArrayLike) -> Floats:
    """Round trips in ms through a straight fibre, [A, B]: a lower bound of real ones."""
    return great_circle_km(a_A2, b_B2) / KM_PER_MS_OF_ROUND_TRIP


def unit_vectors(places_A2: ArrayLike) -> Floats:
    """Locations as points of the unit sphere, [A, 3]."""
    degrees_A2 = np.asarray(places_A2, dtype=np.float64).reshape(-1, 2)
    latitude_A, longitude_A = np.radians(degrees_A2).T
    flat_A = np.cos(latitude_A)
    return np.column_stack(
        (flat_A * np.cos(longitude_A), flat_A * np.sin(longitude_A), np.sin(latitude_A))
    )
