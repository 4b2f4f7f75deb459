"""Which address others are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.settings.models import NodeConfig, PeerConfig
from nesa_node.server.node.invitation import (
    most_reachable_address,
    print_invitation,
    warn_of_other_copies,
)

LOOPBACK, LAN = "/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/192.168.1.7/tcp/1/p2p/x"
PUBLIC, V6, NAME = "/ip4/8.8.8.8/tcp/1/p2p/x", "/ip6/fd00::2/tcp/1/p2p/x", "/dns4/a.b/tcp/1/p2p/x"


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        ((LOOPBACK, LAN, V6), LAN),
        ((LOOPBACK, "/ip6/::1/tcp/1/p2p/x", V6), V6),
        ((LAN, PUBLIC), PUBLIC),
        ((PUBLIC, NAME), NAME),
        ((LOOPBACK,), LOOPBACK),
        ((), None),
    ],
)
def test_others_are_told_the_address_that_most_can_use(
    addresses: tuple[str, ...], best: str | None
) -> None:
    assert most_reachable_address(addresses) == best


def invitation(
    config: PeerConfig, capsys: pytest.CaptureFixture[str], *addresses: str
) -> list[str]:
    swarm: Any = SimpleNamespace(transport=SimpleNamespace(addresses=addresses))
    print_invitation(config, swarm)
    return capsys.readouterr().out.splitlines()


def test_a_first_node_prints_how_it_is_joined(capsys: pytest.CaptureFixture[str]) -> None:
    heading, command = invitation(NodeConfig(model="m"), capsys, LOOPBACK, LAN)
    assert heading == "join with another machine:"
    assert command == f"nesa-node run m --initial-peers {LAN}"
    joined = NodeConfig(model="m", initial_peers=("192.0.2.7:1",))
    assert invitation(joined, capsys, LAN) == []


@pytest.mark.parametrize("initial_peers", [(), ("192.0.2.7:1",)])
def test_a_meeting_point_prints_how_it_is_joined(
    initial_peers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    config = PeerConfig(initial_peers=initial_peers)
    _, command = invitation(config, capsys, LAN)
    assert command == f"nesa-node run MODEL --initial-peers {LAN}"


def test_a_loopback_address_is_no_invitation_for_other_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = NodeConfig(model="m", host_maddrs=("/ip4/127.0.0.1/tcp/0",))
    heading, _ = invitation(here, capsys, LOOPBACK)
    assert heading.startswith("join from this machine (this one listens on this machine only")
    assert "--host-maddrs /ip4/0.0.0.0/tcp/0" in heading
    heading, _ = invitation(NodeConfig(model="m"), capsys, LOOPBACK)
    assert heading.startswith("join from this machine (no address is known")


async def warned(model_id: str, *served: str, error: Exception | None = None) -> list[Any]:
    async def fetch_all() -> list[Any]:
        if error is not None:
            raise error
        return [SimpleNamespace(model_id=each) for each in served]

    directory: Any = SimpleNamespace(fetch_all=fetch_all)
    with capture_logs() as logged:
        await warn_of_other_copies(directory, model_id)
    return [entry for entry in logged if entry["log_level"] == "warning"]


async def test_a_node_with_other_weights_than_the_swarm_is_told_both_names() -> None:
    (warning,) = await warned("tiny@0", "tiny@0", "tiny@1", "other@2", "tiny@1")
    assert warning["event"] == "other_copy_served"
    assert (warning["served"], warning["here"]) == ("tiny@1", "tiny@0")


async def test_a_node_with_the_weights_of_the_swarm_is_told_nothing() -> None:
    assert await warned("tiny@0", "tiny@0", "other@1") == []
    assert await warned("tiny@0") == []


@pytest.mark.parametrize("error", [TimeoutError(), PeerUnreachableError("gone")])
async def test_a_look_for_other_weights_that_fails_harms_nothing(error: Exception) -> None:
    assert await warned("tiny@0", error=error) == []
