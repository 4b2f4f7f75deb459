"""Published tables of measured round trips between regions: `NAME.json`, with source and licence.

A file has the regions, in degrees, and the rows below the diagonal of their matrix.

Legend: R regions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.topology.geography import Region

TABLE_NAMES = ("gcp",)


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable:
    """Round trips between regions; symmetric, and within a region on the diagonal."""

    name: str
    what: str
    source: str
    licence: str
    regions: tuple[Region, ...]
    rtt_ms_RR: Floats


def load_table(name: str = "gcp") -> RegionTable:
    """Load a table of `TABLE_NAMES`; `ConfigError` for any other name."""
    if name not in TABLE_NAMES:
        raise ConfigError(f"no table is called {name!r}; there are {', '.join(TABLE_NAMES)}")
    text = resources.files(__name__).joinpath(f"{name}.json").read_text("utf-8")
    table = json.loads(text)
    regions = tuple(Region(**region) for region in table["regions"])
    rtt_ms_RR = np.zeros((len(regions), len(regions)))
    for row, values in enumerate(table["rtt_ms"]):
        rtt_ms_RR[row, :row] = values
    rtt_ms_RR += rtt_ms_RR.T
    np.fill_diagonal(rtt_ms_RR, table["within_region_ms"])
    rtt_ms_RR.flags.writeable = False
    return RegionTable(
        table["name"], table["what"], table["source"], table["licence"], regions, rtt_ms_RR
    )
