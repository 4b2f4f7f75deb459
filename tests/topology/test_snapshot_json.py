import base64
import json
import zlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import NodeState, Snapshot
from nesa_node.topology.snapshot_json import _SnapshotNode, snapshot_from_json, snapshot_to_json

WORLD = make_world(12, 20, np.random.default_rng(0)).snapshot
NUMBER = st.floats(0, 1e15)
FIGURES = st.floats(1e-3, 1e18)
NODES = st.builds(
    NodeState,
    peer_id=st.text(min_size=1, max_size=20).map(PeerId),
    span=st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda ab: Span(*sorted(ab))),
    prefill_tokens_per_s=NUMBER,
    load=NUMBER,
    addresses=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    public_name=st.none() | st.text(max_size=9),
    reliability=st.floats(0, 1),
    movable=st.booleans(),
    location=st.none() | st.tuples(st.floats(-90, 90), st.floats(-180, 180)),
    gpu_memory_total_bytes=st.integers(0, 1 << 50),
    operator=st.none() | st.text(max_size=9),
    roofline=st.none()
    | st.builds(
        Roofline,
        st.builds(WeightFigures, st.floats(0, 1e3), FIGURES, FIGURES, st.booleans()),
        st.builds(BlockWork, FIGURES, FIGURES),
    ),
)


def _document(**changes: Any) -> bytes:
    document = json.loads(snapshot_to_json(WORLD))
    for path, value in changes.items():
        at = document
        *parents, last = path.split("__")
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        at[last] = value
    return json.dumps(document).encode()


def test_world_comes_back_as_it_was() -> None:
    back = snapshot_from_json(snapshot_to_json(WORLD))
    assert back.nodes == WORLD.nodes
    assert back.digest() == WORLD.digest()
    assert back.links is not None
    assert WORLD.links is not None
    for name in ("rtt_ms_NN", "rate_bytes_per_s_NN", "age_s_NN", "confidence_NN"):
        assert np.array_equal(getattr(back.links, name), getattr(WORLD.links, name))


def test_indented_and_reordered_text_has_the_same_digest() -> None:
    document = json.loads(snapshot_to_json(WORLD))
    text = json.dumps(document, indent=2, sort_keys=True)
    assert snapshot_from_json(text).digest() == WORLD.digest()


@given(st.lists(NODES, max_size=4, unique_by=lambda node: node.peer_id), st.floats(-1e9, 1e10))
def test_any_snapshot_comes_back(nodes: list[NodeState], taken_at: float) -> None:
    snapshot = Snapshot(ModelId("m@0"), 7, tuple(nodes[:2]), taken_at, tuple(nodes[2:]))
    back = snapshot_from_json(snapshot_to_json(snapshot))
    assert back == snapshot
    assert back.digest() == snapshot.digest()


def test_unknown_links_come_back() -> None:
    links = Links.unknown([PeerId("a"), PeerId("b")])
    snapshot = Snapshot(ModelId("m@0"), 1, (), 0.0, links=links)
    back = snapshot_from_json(snapshot_to_json(snapshot))
    assert back.links is not None
    assert np.isnan(back.links.rtt_ms_NN[0, 1])
    assert back.digest() == snapshot.digest()


def test_order_of_nodes_and_links_makes_no_difference_to_the_digest() -> None:
    assert WORLD.links is not None
    backwards = tuple(reversed(WORLD.nodes))
    peers = [node.peer_id for node in backwards]
    assert replace(WORLD, nodes=backwards).digest() == WORLD.digest()
    assert replace(WORLD, links=WORLD.links.select(peers)).digest() == WORLD.digest()


def test_every_change_changes_the_digest() -> None:
    links = WORLD.links
    assert links is not None
    rate_NN = links.rate_bytes_per_s_NN.copy()
    rate_NN[0, 1] *= 1.0000001
    changed = [
        replace(WORLD, taken_at=1.0),
        replace(WORLD, num_blocks=21),
        replace(WORLD, nodes=WORLD.nodes[:-1], joining=WORLD.nodes[-1:]),
        replace(WORLD, nodes=(replace(WORLD.nodes[0], load=0.123), *WORLD.nodes[1:])),
        replace(WORLD, links=None),
        replace(WORLD, links=replace(links, rate_bytes_per_s_NN=rate_NN)),
    ]
    assert len({WORLD.digest(), *(snapshot.digest() for snapshot in changed)}) == 7


def test_digest_is_the_same_tomorrow() -> None:
    node = NodeState(PeerId("a"), Span(0, 2), load=0.5)
    links = Links.unknown([PeerId("a")])
    snapshot = Snapshot(ModelId("m@0"), 2, (node,), 12.5, links=links)
    assert snapshot.digest() == "057f3a225a0fb52dfeab15ef611cdc65bc43686cf1d03e11c42932747c3eaa5c"


def test_kinds_of_zero_say_the_same() -> None:
    def snapshot(zero: float) -> Snapshot:
        node = NodeState(PeerId("a"), Span(0, 1), load=zero, location=(zero, zero))
        return Snapshot(ModelId("m@0"), 1, (node,), zero)

    assert snapshot(0).digest() == snapshot(0.0).digest() == snapshot(-0.0).digest()
    assert snapshot_from_json(snapshot_to_json(snapshot(0))).digest() == snapshot(0).digest()


def test_document_has_every_field_of_a_node() -> None:
    assert {field.name for field in fields(NodeState)} == set(_SnapshotNode.__struct_fields__)


BOMB = base64.b64encode(zlib.compress(bytes(50_000_000), 9)).decode()
SHORT = base64.b64encode(zlib.compress(bytes(8))).decode()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 2}, "has version 2"),
        ({"format": "gguf"}, "no snapshot"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"num_blocks": 10**9}, "num_blocks"),
        ({"taken_at": "now"}, "taken_at"),
        ({"surprise": 1}, "surprise"),
        ({"nodes__0__span": {"start": 5, "end": 3}}, "5:3"),
        ({"nodes__0__load": -1.0}, r"nodes\[0?\.*\]?"),
        ({"nodes__0__reliability": 1.5}, "reliability"),
        ({"nodes__0__location": [95.0, 0.0]}, "location"),
        ({"nodes__0__peer_id": "n0001"}, "twice"),
        ({"nodes__0__peer_id": "x" * 300}, "peer_id"),
        ({"links__peers": ["n0000"] * 12}, "twice"),
        ({"links__peers": [f"p{row}" for row in range(6000)]}, "peers"),
        ({"links__rtt_ms_NN": "not base64!"}, "rtt_ms_NN does not hold 12 x 12"),
        ({"links__rtt_ms_NN": BOMB}, "rtt_ms_NN does not hold 12 x 12"),
        ({"links__rtt_ms_NN": SHORT}, "rtt_ms_NN does not hold 12 x 12"),
        ({"links__rtt_ms_NN": ""}, "rtt_ms_NN does not hold 12 x 12"),
        ({"links": {}}, "peers"),
    ],
)
def test_hostile_documents_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        snapshot_from_json(_document(**changes), where="bad.json")


@pytest.mark.parametrize("value", [-1.0, np.inf])
def test_absurd_links_are_refused(value: float) -> None:
    rtt_NN = np.full((2, 2), value)
    packed = base64.b64encode(zlib.compress(rtt_NN.tobytes())).decode()
    document = json.loads(
        snapshot_to_json(replace(WORLD, links=Links.unknown([PeerId("a"), PeerId("b")])))
    )
    document["links"]["rtt_ms_NN"] = packed
    with pytest.raises(ConfigError):
        snapshot_from_json(json.dumps(document))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(ConfigError):
        snapshot_from_json(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_flipped_byte_is_refused_or_reads_as_a_snapshot(at: int, byte: int) -> None:
    data = bytearray(snapshot_to_json(WORLD))
    data[at % len(data)] = byte
    try:
        snapshot_from_json(bytes(data))
    except ConfigError:
        return


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ConfigError):
        snapshot_from_json(b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_numbers_that_json_lacks_are_refused_when_writing() -> None:
    node = NodeState(PeerId("a"), Span(0, 1), load=float("nan"))
    with pytest.raises(ValueError, match="'a'"):
        snapshot_to_json(Snapshot(ModelId("m@0"), 1, (node,), 0.0))
