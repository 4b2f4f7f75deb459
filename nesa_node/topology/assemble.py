"""One picture of the links from what every node says that it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.topology.links import Links
from nesa_node.topology.measured import peer_digest
from nesa_node.topology.snapshot import NodeState, Snapshot

HALF_LIFE_S = 600.0
"""Of the confidence in a measurement."""
ONE_SIDED = 0.5
"""Confidence in what only one end has measured."""


def with_links(snapshot: Snapshot) -> Snapshot:
    """The same with the links among all its nodes: N x N, so for whoever plans."""
    return replace(snapshot, links=assemble_links((*snapshot.nodes, *snapshot.joining)))


def assemble_links(nodes: Sequence[NodeState]) -> Links:
    """The links among `nodes` from their records; pairs that neither has measured are unknown.

    A round trip is the *larger* of what its two ends have measured. Both are medians of pings that
    are the shortest of three, so that honest ends differ little; and a node cannot come near by
    saying so, where the other end has looked for itself. Rates stay as the sender has them.
    Confidence halves every `HALF_LIFE_S`, and is half where one end only has measured.
    """
    peers = tuple(PeerId(node.peer_id) for node in nodes)
    row_of = {peer_digest(peer): row for row, peer in enumerate(peers)}
    size = len(peers)
    rtt_ms_NN, rate_NN, age_s_NN = (np.full((size, size), np.nan) for _ in range(3))
    for row, node in enumerate(nodes):
        for link in node.measured:
            column = row_of.get(link.digest)
            if column is not None and column != row:
                rtt_ms_NN[row, column] = link.rtt_ms
                rate_NN[row, column] = link.rate_bytes_per_s
                age_s_NN[row, column] = link.age_s
    both_NN = ~np.isnan(rtt_ms_NN) & ~np.isnan(rtt_ms_NN.T)
    ages_NN = np.fmin(age_s_NN, age_s_NN.T)
    trust_NN = np.where(both_NN, 1.0, ONE_SIDED)
    confidence_NN = np.nan_to_num(trust_NN * 0.5 ** (ages_NN / HALF_LIFE_S))
    rtt_ms_NN = np.fmax(rtt_ms_NN, rtt_ms_NN.T)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    np.fill_diagonal(rate_NN, np.inf)
    np.fill_diagonal(confidence_NN, 1.0)
    return Links(peers, rtt_ms_NN, rate_NN, ages_NN, confidence_NN)
