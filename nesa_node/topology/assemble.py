"""Link matrix of a swarm, assembled from the measurements in all node records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.topology.links import Links
from nesa_node.topology.measured import links_from_measurements
from nesa_node.topology.packed import Measured, peer_digest


def assemble_links(measured: Mapping[PeerId, Sequence[Measured]]) -> Links:
    """Links among the peers of `measured`; pairs that neither end measured are unknown.

    Takes O(N^2) memory. `links_from_measurements` combines the measurements of both ends.
    """
    peers = tuple(measured)
    row_of = {peer_digest(peer): row for row, peer in enumerate(peers)}
    shape = (len(peers), len(peers))
    rtt_ms_NN, rate_NN, age_s_NN = (np.full(shape, np.nan) for _ in range(3))
    for row, links in enumerate(measured.values()):
        for link in links:
            column = row_of.get(link.digest)
            if column is not None and column != row:
                rtt_ms_NN[row, column] = link.rtt_ms
                rate_NN[row, column] = link.rate_bytes_per_s
                age_s_NN[row, column] = link.age_s
    return links_from_measurements(peers, rtt_ms_NN, age_s_NN, rate_NN)
