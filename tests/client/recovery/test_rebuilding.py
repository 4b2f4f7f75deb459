"""What a session that could not be opened says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nesa_node.client.recovery.retry import ChainRebuilder
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session import connection
from nesa_node.client.session.connection import open_connection
from nesa_node.core.errors import (
    ConfigError,
    MissingBlocksError,
    PeerUnreachableError,
    SwarmError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.transport import Transport


def given_up(last: Exception, *served: str, hopeless: bool = True) -> str:
    route: Any = SimpleNamespace(
        selector=SimpleNamespace(served_models=served),
        links=(),
        opener=SimpleNamespace(unreached_spans=()),
    )
    request: Any = SimpleNamespace(
        span=Span(0, 4),
        model_id="tiny@0",
        options=ConnectionOptions(recovery_timeout_s=1, queue_timeout_s=1),
    )
    nothing: Any = None
    rebuilding = ChainRebuilder(
        route,
        request,
        nothing,
        nothing,
        rng=random.Random(0),
    )
    return str(rebuilding._final_error(last, hopeless=hopeless))


MISSING = MissingBlocksError([(0, 4)], "no usable node holds blocks 0:4")
WHY = (
    "no node serves blocks 0:4 of tiny@0 (and none is joining with them): start one with "
    "`nesa-node run`"
)


def test_missing_blocks_are_told_once() -> None:
    assert given_up(MISSING) == WHY


def test_what_the_swarm_serves_instead_is_told_up_to_a_number() -> None:
    assert given_up(MISSING, "a@1") == f"{WHY}; the swarm serves a@1"
    names = [f"m{number}@1" for number in range(6)]
    listed = "m0@1, m1@1, m2@1, m3@1 and 2 more"
    assert given_up(MISSING, *names) == f"{WHY}; the swarm serves {listed}"


def test_blocks_whose_nodes_fail_are_not_said_to_have_none() -> None:
    words = "no node with blocks 0:4 of tiny@0 could be reached (waited 1 s): x is silent"
    assert given_up(PeerUnreachableError("x is silent"), hopeless=False) == words


async def test_connection_ends_with_its_own_libp2p_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by a model, it is then made anew; a chain that breaks is not waited for."""
    daemon: Any = SimpleNamespace(exited=asyncio.Event())
    transport = Transport(PeerId("client"), daemon, daemon, daemon)
    swarm: Any = MagicMock(transport=transport)

    @asynccontextmanager
    async def open_swarm(*_: object, **__: object) -> AsyncIterator[Swarm]:
        yield swarm

    monkeypatch.setattr(connection, "open_swarm", open_swarm)
    monkeypatch.setattr(connection, "compute_model_id", lambda _: "tiny@0")
    checkpoint: Any = SimpleNamespace(num_blocks=4, config=SimpleNamespace(hidden_size=4))
    options = ConnectionOptions(initial_peers=("127.0.0.1:1",))
    with pytest.RaisesGroup(pytest.RaisesExc(SwarmError, match="p2pd")):
        async with (
            asyncio.timeout(10),
            open_connection(checkpoint, options, torch.float32) as opened,
        ):
            before = opened.is_lost
            daemon.exited.set()
            assert (before, opened.is_lost) == (False, True)
            with pytest.raises(SwarmError, match="p2pd"):
                await opened.open_session(Span(0, 4), rows=1, max_tokens=8).__aenter__()
            await asyncio.Event().wait()


async def test_without_initial_peers_no_swarm_is_said_to_lack_the_model() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="initial_peers is needed"):
        async with open_connection(nothing, ConnectionOptions(), torch.float32):
            pass
