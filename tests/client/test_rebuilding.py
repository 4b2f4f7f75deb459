"""What a session that could not be opened says."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nesa_node.client.connection import open_connection
from nesa_node.client.options import ConnectionOptions
from nesa_node.client.rebuilding import Rebuilding
from nesa_node.core.errors import ConfigError, MissingBlocksError, PeerUnreachableError
from nesa_node.core.span import Span


def given_up(last: Exception, *served: str) -> str:
    route: Any = SimpleNamespace(
        nodes=SimpleNamespace(served=served), links=(), opener=SimpleNamespace(unreached=())
    )
    request: Any = SimpleNamespace(span=Span(0, 4), model_id="tiny@0")
    nothing: Any = None
    rebuilding = Rebuilding(
        route,
        request,
        nothing,
        nothing,
        recovery_timeout_s=1,
        queue_timeout_s=1,
        rng=random.Random(0),
    )
    return str(rebuilding._give_up(last, hopeless=True))


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


def test_another_last_failure_is_named() -> None:
    assert given_up(PeerUnreachableError("x is silent")).endswith("that failed: x is silent")


async def test_without_initial_peers_no_swarm_is_said_to_lack_the_model() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="initial_peers is needed"):
        async with open_connection(nothing, ConnectionOptions(), torch.float32):
            pass
