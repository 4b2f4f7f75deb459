"""Links among a model's nodes, as viewers see them, and the time of the fastest chain's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import chain_cost_s, plan_chain
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.topology.links.assembly import assemble_links
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import Snapshot

MAX_LINKED_NODES = 300
"""Maximum nodes of the link matrices, which grow with the square; the oldest are used."""
MAX_SHOWN_LINKS = 1200


@dataclass(frozen=True, slots=True)
class LinksSummary:
    """Links of one model. `entries` are keyed by "peer|peer".

    `step_s` is the time of one token from the first to the last node of the fastest chain, in
    seconds; None without a chain.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    median_rtt_ms: float | None = None
    step_s: float | None = None


def summarize_links(model: ModelId, records: Sequence[NodeRecord], num_blocks: int) -> LinksSummary:
    """View the links of one model's present nodes. Takes 20 ms for 300: call it in a thread."""
    records = records[:MAX_LINKED_NODES]
    measured = {PeerId(record.peer_id): record.measured_links() for record in records}
    links = assemble_links(measured)
    shortest = links.shortest_pairs(MAX_SHOWN_LINKS)
    return LinksSummary(
        entries={
            f"{links.peers[a]}|{links.peers[b]}": _link_entry(links, a, b) for a, b in shortest.rows
        },
        median_rtt_ms=shortest.median_rtt_ms,
        step_s=_fastest_step_s(model, records, num_blocks, links),
    )


def _link_entry(links: Links, a: int, b: int) -> dict[str, Any]:
    """View of one link; the rates are from `a` to `b` and back, None without a measurement."""
    return {
        "rtt_ms": _round_to_2_digits(links.rtt_ms_NN[a, b]),
        "bytes_per_s": [
            _round_to_2_digits(links.rate_bytes_per_s_NN[a, b]),
            _round_to_2_digits(links.rate_bytes_per_s_NN[b, a]),
        ],
        "age_min": round(float(links.age_s_NN[a, b]) / 60),
    }


def _round_to_2_digits(value: float) -> float | None:
    return float(f"{value:.2g}") if math.isfinite(value) else None


def _fastest_step_s(
    model: ModelId, records: Sequence[NodeRecord], num_blocks: int, links: Links
) -> float | None:
    nodes = tuple(
        record.node_state()
        for record in records
        if record.state == "serving" and record.num_blocks == num_blocks
    )
    snapshot = Snapshot(model, num_blocks, nodes, 0.0, links=links)
    peers = [node.peer_id for node in nodes]
    at_once = dict.fromkeys(peers, math.inf)
    request = ChainRequest(
        span=Span(0, num_blocks),
        entry_rtt_ms=dict.fromkeys(peers, 0.0),
        entry_bytes_per_s=at_once,
        exit_bytes_per_s=at_once,
    )
    try:
        return chain_cost_s(snapshot, request, plan_chain(snapshot, request))
    except MissingBlocksError:
        return None
