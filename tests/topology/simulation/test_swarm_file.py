import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.simulation.devices import DEVICES, LLAMA_70B
from nesa_node.topology.simulation.newcomer import add_newcomers, parse_newcomer
from nesa_node.topology.simulation.swarm_file import SwarmFile, parse_swarm_file
from nesa_node.topology.tables import load_table

SWARM: dict[str, Any] = {
    "num_blocks": 80,
    "nodes": [
        {"name": "attic", "device": "rtx3090", "region": "frankfurt", "span": "0:11"},
        {"name": "lab", "device": "a100", "count": 3, "region": "london"},
        {"name": "old", "tokens_per_s": 40, "max_blocks": 8, "location": [48.1, 11.6]},
        {"name": "lost", "tokens_per_s": 10, "memory_gb": 8},
    ],
    "round_trips_ms": {"attic": {"old": 18}},
    "client": {"region": "paris"},
}
A, OLD = PeerId("attic"), PeerId("old")


def _read(swarm: Any) -> SwarmFile:
    return parse_swarm_file(json.dumps(swarm), np.random.default_rng(0))


def test_swarm_is_read_as_it_is_written() -> None:
    swarm = _read(SWARM)
    nodes = {node.peer_id: node for node in swarm.snapshot.nodes}
    assert list(nodes) == ["attic", "lab-1", "lab-2", "lab-3", "old", "lost"]
    assert nodes[A].span == Span(0, 11)
    rtx3090 = DEVICES["rtx3090"]
    assert nodes[A].decode_tokens_per_s == pytest.approx(1 / (11 * rtx3090.decode_block_s()))
    assert nodes[A].max_blocks == rtx3090.max_blocks(LLAMA_70B)
    assert nodes[OLD].span == Span(0, 0)
    assert nodes[OLD].decode_tokens_per_s == 40
    assert nodes[PeerId("lost")].max_blocks == int(7.2e9 // LLAMA_70B.weight_bytes())


def test_every_link_of_a_written_swarm_is_known() -> None:
    swarm = _read(SWARM)
    links = swarm.snapshot.links
    assert links is not None
    assert links.rtt_ms(A, OLD) == 18
    assert np.isfinite(links.rtt_ms_NN).all()
    assert np.array_equal(links.rtt_ms_NN, links.rtt_ms_NN.T)
    # London to Frankfurt: 640 km, and a home's access link at one end.
    assert 15 < links.rtt_ms(A, PeerId("lab-1")) < 30
    assert links.rtt_ms(PeerId("lab-1"), PeerId("lab-2")) < 3
    assert swarm.client_rtt_ms is not None
    assert swarm.client_rtt_ms[A] > swarm.client_rtt_ms[PeerId("lab-1")]
    assert not np.isnan(links.rate_bytes_per_s_NN).any()


def test_regions_of_a_table_have_its_round_trips() -> None:
    table = load_table()
    names = ("asia-south1", "europe-west3")
    nodes = [{"device": "a100", "region": name, "access_ms": 0.001} for name in names]
    links = _read({"nodes": nodes}).snapshot.links
    assert links is not None
    rows = [[region.name for region in table.regions].index(name) for name in names]
    assert links.rtt_ms_NN[0, 1] == pytest.approx(table.rtt_ms_RR[rows[0], rows[1]] + 0.002)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nodes": []}, r"nodes"),
        ({"nodes": [{"name": "x"}]}, r"nodes\[0\] \(x\) needs a device or tokens_per_s"),
        ({"nodes": [{"tokens_per_s": 5}]}, r"nodes\[0\] needs max_blocks, memory_gb"),
        ({"nodes": [{"device": "rtx9090"}]}, r"nodes\[0\].*'rtx9090'.*rtx4090"),
        ({"nodes": [{"device": "t4", "region": "mars"}]}, r"'mars'.*frankfurt"),
        ({"nodes": [{"device": "t4", "span": "3"}]}, r"nodes\[0\].*0:10"),
        ({"nodes": [{"device": "t4", "span": "78:84"}]}, r"78:84 goes beyond"),
        ({"nodes": [{"device": "t4", "span": "0:80"}]}, r"longer than the 8 blocks"),
        ({"nodes": [{"tokens_per_s": 5, "memory_gb": 1}]}, r"no room for a block of 1\.71 GB"),
        ({"nodes": [{"device": "t4", "wheels": 4}]}, r"wheels"),
        ({"nodes": [{"device": "t4", "location": [99, 0]}]}, r"nodes\[0\]\.location"),
        ({"nodes": [{"device": "t4", "location": [9, 0], "region": "paris"}]}, r"leave one"),
        ({"nodes": [{"device": "t4", "name": "a"}, {"device": "t4", "name": "a"}]}, r"called 'a'"),
        ({"nodes": [{"device": "t4", "count": 4000}] * 2}, r"8000 nodes"),
        ({"round_trips_ms": {"attic": {"nobody": 5}}}, r"no node is called 'nobody'"),
        ({"round_trips_ms": {"attic": {"attic": 5}}}, r"to itself"),
        ({"round_trips_ms": {"attic": {"old": 5}, "old": {"attic": 6}}}, r"keep one"),
        ({"round_trips_ms": {"attic": {"old": -5}}}, r"round_trips_ms"),
        ({"quantization": "int3"}, r"'int3' is none of"),
        ({"num_blocks": 0}, r"num_blocks"),
        ({"client": {"region": "mars"}}, r"client: no region"),
    ],
)
def test_mistakes_are_told_with_their_place(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        _read({**SWARM, **changes})
    assert "swarm.json" in str(caught.value)


@given(st.binary(max_size=100))
def test_nonsense_is_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_swarm_file(data, np.random.default_rng(0))


def test_newcomers_are_parsed() -> None:
    one = parse_newcomer("rtx3090@40ms")
    assert (one.device.name, one.count, one.rtt_ms, one.location) == ("rtx3090", 1, 40.0, None)
    many = parse_newcomer("3xA100@frankfurt")
    assert (many.device.name, many.count, many.rtt_ms) == ("a100", 3, None)
    assert many.location == pytest.approx((50.11, 8.68))
    assert parse_newcomer("RTX 3090@us-east1").device.name == "rtx3090"


@pytest.mark.parametrize(
    "text", ["", "rtx3090", "@40ms", "rtx3090@", "rtx9090@4ms", "t4@mars", "0xt4@1ms", "t4@0ms"]
)
def test_newcomers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_newcomer(text)


def test_newcomers_join_with_links_to_everybody() -> None:
    snapshot = _read(SWARM).snapshot
    rng = np.random.default_rng(0)
    joined = add_newcomers(snapshot, parse_newcomer("2xrtx3090@40ms"), rng)
    joined = add_newcomers(joined, parse_newcomer("rtx3090@frankfurt"), rng)
    assert joined.links is not None
    assert [node.peer_id for node in joined.nodes[6:]] == [f"new-rtx3090-{n}" for n in (1, 2, 3)]
    assert joined.nodes[6].max_blocks == DEVICES["rtx3090"].max_blocks()
    assert joined.links.rtt_ms(A, PeerId("new-rtx3090-1")) == 40
    assert joined.links.rtt_ms(A, PeerId("new-rtx3090-3")) < 40
    assert joined.links.rtt_ms(A, OLD) == 18
    assert np.isfinite(joined.links.rtt_ms_NN).all()
    assert not np.isnan(joined.links.rate_bytes_per_s_NN).any()
    assert snapshot.links is not None
    old = len(snapshot.nodes)
    assert np.array_equal(joined.links.rtt_ms_NN[:old, :old], snapshot.links.rtt_ms_NN)
