"""Joining a swarm some of whose initial peers are gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from structlog.testing import capture_logs

from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.local_swarm import LOOPBACK, local_swarm


async def test_a_frozen_initial_peer_is_not_waited_for_where_another_answers(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as (frozen, alive):
        addresses = [*frozen.transport.addresses, *alive.transport.addresses]
        os.kill(frozen.transport.daemon_pid, signal.SIGSTOP)
        try:
            with capture_logs() as lines:
                async with open_swarm(
                    Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK, initial_peers=addresses
                ) as member:
                    connected = await member.transport.control.connected_peers()
        finally:
            os.kill(frozen.transport.daemon_pid, signal.SIGCONT)
        assert alive.transport.peer_id in connected
        (failure,) = [line for line in lines if line["event"] == "initial_peer_unreachable"]
        assert failure["peer"] == frozen.transport.peer_id
        assert "after the first" in failure["error"]
