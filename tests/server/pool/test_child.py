"""Settings that a member of a pool passes to its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.core.settings.sources import load_config
from nesa_node.server.pool.child import child_identity_path, child_settings, write_toml
from nesa_node.swarm.dht.pool_notices import AssignedSpan

ASSIGNED = AssignedSpan(
    model="org/one", span=(3, 9), quant_type="int8", dtype="float32", cache_tokens=4096
)


def member(folder: Path, **given: object) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "identity_path": folder / "identity.key",
            "cache_dir": folder / 'a "quoted" folder',
            "swarm_key": "a secret\nof two lines",
            "host_maddrs": ("/ip4/0.0.0.0/tcp/31330", "/ip6/::/udp/31330/quic-v1"),
            "allow_peers": (PeerId("12D3KooWA"), PeerId("12D3KooWB")),
            "location": (52.5, 13.4),
            "public_name": "Zürich 1",
            "operator": "ETH",
            "threads": 2,
            "pool_disk_gib": 7.5,
            **given,
        }
    )


def test_a_node_reads_the_members_settings_and_what_was_assigned(tmp_path: Path) -> None:
    config = member(tmp_path)
    file = tmp_path / "settings.toml"
    file.write_text(write_toml(child_settings(config, ASSIGNED, tmp_path)), encoding="utf-8")
    found = load_config(NodeConfig, {"model": "org/one"}, {}, file)
    assert found.first_blocks == Span(3, 9)
    assert found.block_indices is None
    assert (found.quant_type, found.torch_dtype, found.attn_cache_tokens) == (
        "int8",
        "float32",
        4096,
    )
    assert (found.max_disk_gib, found.evict_downloads) == (7.5, True)
    assert found.host_maddrs == ("/ip4/0.0.0.0/tcp/0", "/ip6/::/udp/0/quic-v1")
    shared = ("cache_dir", "swarm_key", "allow_peers", "location", "public_name", "operator")
    for name in (*shared, "threads"):
        assert getattr(found, name) == getattr(config, name), name


def test_each_model_has_an_identity_of_its_own_that_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    paths = [child_identity_path(path, model) for model in ("org/one", "org/two", "one")]
    assert len({path, *paths}) == 4
    assert {each.parent for each in paths} == {tmp_path}
    assert child_identity_path(path, "org/one") == paths[0]


@pytest.mark.parametrize("flag", ["api", "orchestrator", "http", "metrics"])
def test_the_members_servers_are_its_own(tmp_path: Path, flag: str) -> None:
    assert flag not in child_settings(member(tmp_path), ASSIGNED, tmp_path)
