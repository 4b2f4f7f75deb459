"""The document that a page about a swarm's topology is drawn from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.changes.triggers import HistoryEntry, Trigger, trigger_readings
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.report import MAX_LINKS, topology_report
from nesa_node.topology.shape.stability import connection_heights
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import NodeState, Snapshot

SQUARE = [[0, 10, 25, 10], [10, 0, 10, 25], [25, 10, 0, 10], [10, 25, 10, 0]]
"""Four nodes in a ring: H1 is born at 10 and dies at 25."""


def snapshot_of(rtt_ms: Any, **fields: Any) -> Snapshot:
    rtt_ms_NN = np.array(rtt_ms, dtype=np.float64)
    peers = tuple(PeerId(f"peer{i}") for i in range(len(rtt_ms_NN)))
    unknown = Links.unknown(peers)
    nodes = tuple(NodeState(peer, Span(0, 4), **fields) for peer in peers)
    links = Links(
        peers, rtt_ms_NN, unknown.rate_bytes_per_s_NN, unknown.age_s_NN, unknown.confidence_NN
    )
    return Snapshot(ModelId("m"), 4, nodes, 100.0, links=links)


def plain(report: dict[str, Any]) -> Any:
    """As it arrives: JSON without NaN or infinity."""
    return json.loads(json.dumps(report, allow_nan=False))


def trigger(figure: float, *, fired: bool) -> Trigger:
    return Trigger(
        name="shift", fired=fired, figure=figure, threshold=0.25, in_a_row=2, reason="far"
    )


def test_bars_and_betti_numbers_are_those_of_a_ring() -> None:
    shape = plain(topology_report(snapshot_of(SQUARE)))["shapes"]["round_trips"]
    assert shape["h0"]["bars"] == [[0, None], [0, 10], [0, 10], [0, 10]]
    assert shape["h1"]["bars"] == [[10, 25]]
    assert shape["betti"]["at_median_edge"] == [1, 1]
    assert shape["betti"]["b0"][0] == 4
    assert (shape["betti"]["b0"][-1], shape["betti"]["b1"][-1]) == (1, 0)
    (ring,) = shape["rings"]
    assert sorted({node for edge in ring["edges"] for node in edge}) == [0, 1, 2, 3]
    assert sorted(shape["leaves"]) == [0, 1, 2, 3]
    assert shape["gaps"] == [None, 10, 10, 10]


def test_a_network_counts_compute_and_geography_those_who_say_where() -> None:
    snapshot = snapshot_of(SQUARE, decode_tokens_per_s=100.0)
    places = [(52.5, 13.4), None, (51.5, -0.1), (48.9, 2.3)]
    nodes = tuple(
        replace(node, location=place) for node, place in zip(snapshot.nodes, places, strict=True)
    )
    shapes = plain(topology_report(replace(snapshot, nodes=nodes)))["shapes"]
    # Half a round trip of 10 ms, and 10 ms at both ends.
    assert shapes["network"]["h0"]["bars"] == [[10, None], [10, 25], [10, 25], [10, 25]]
    assert shapes["geography"]["unit"] == "km"
    assert shapes["geography"]["nodes"] == [0, 2, 3]
    assert 300 < shapes["geography"]["h0"]["bars"][-1][1] < 400  # London to Paris


def test_history_tells_figures_thresholds_and_when_triggers_fired() -> None:
    looks = [
        HistoryEntry(
            at=float(at),
            digest="",
            nodes=4,
            seen=trigger_readings([trigger(figure, fired=fired)]),
            strategy="rebalance-latency",
            parameters={"min_gain": gain},
            exponents={"gamma": 1.0},
            why_exponents="as shipped",
        )
        for at, figure, fired, gain in (
            (1, 0.1, False, 0.1),
            (2, float("inf"), True, 0.1),
            (3, 0.0, False, 0.2),
        )
    ]
    looks.insert(1, HistoryEntry(at=1.5, digest="", nodes=4))
    report = plain(topology_report(snapshot_of(SQUARE), looks=looks, active={"name": "1.2@x"}))
    shift = report["history"]["triggers"]["shift"]
    assert report["history"]["at"] == [1, 1.5, 2, 3]
    assert shift["figure"] == [0.1, None, None, 0]
    assert shift["threshold"] == [0.25, None, 0.25, 0.25]
    assert shift["fired"] == [False, False, True, False]
    assert report["events"] == [
        {"at": 2, "trigger": "shift", "figure": None, "threshold": 0.25, "reason": "far"}
    ]
    assert report["active"] == {"name": "1.2@x"}
    assert report["strategy"] == "rebalance-latency"
    assert report["parameters"]["now"] == {"min_gain": 0.2}
    assert [change["at"] for change in report["parameters"]["history"]] == [1, 3]
    assert report["exponents"] == {
        "now": {"gamma": 1},
        "history": [{"at": 1, "values": {"gamma": 1}, "why": "as shipped"}],
    }


def test_links_are_told_once_each_the_shortest_first() -> None:
    rtt_ms = np.array(SQUARE, dtype=np.float64)
    rtt_ms[0, 2] = rtt_ms[2, 0] = np.nan
    links = plain(topology_report(snapshot_of(rtt_ms)))["links"]
    assert [pair["rtt_ms"] for pair in links["pairs"]] == [10, 10, 10, 10, 25]
    assert links["pairs"][-1]["nodes"] == [1, 3]
    assert links["pairs"][0]["age_s"] is None
    assert links["median_rtt_ms"] == 10


def test_stability_needs_history() -> None:
    snapshot = snapshot_of(SQUARE)
    assert plain(topology_report(snapshot))["nodes"][0]["stability"] is None
    past = [connection_heights(snapshot)] * 6
    assert plain(topology_report(snapshot, heights=past))["nodes"][0]["stability"] == 1


@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_small_swarms_and_unmeasured_ones_have_a_report(nodes: int) -> None:
    snapshot = snapshot_of(np.zeros((nodes, nodes)))
    for each in (snapshot, replace(snapshot, links=None)):
        report = plain(topology_report(each, heights=[connection_heights(each)]))
        assert len(report["nodes"]) == nodes
        assert report["coverage"] == [nodes] * 4


def test_a_large_swarm_is_bounded() -> None:
    snapshot = make_world(600, 80, np.random.default_rng(0)).snapshot
    report = plain(topology_report(snapshot))
    assert len(report["links"]["pairs"]) == MAX_LINKS
    assert report["links"]["left_out"] == 600 * 599 // 2 - MAX_LINKS
    assert report["shapes"]["round_trips"]["h0"]["left_out"] > 0
    assert report["shapes"]["round_trips"]["h1_nodes"] == 200
