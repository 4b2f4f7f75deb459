"""What a node tells of itself, whatever happens to the parts that it could leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.server.announcer import Announcer, NodeFacts
from nesa_node.swarm.records import NodeStatus
from nesa_node.topology.packed import Measured, pack_measured, peer_digest

FACTS = NodeFacts(
    model_id="tiny@0",
    model_name="tiny",
    num_blocks=8,
    context_length=128,
    dtype=torch.float32,
    quant_type="none",
    device=torch.device("cpu"),
    public_name=None,
    max_blocks=8,
    location=None,
)
LINK = Measured(peer_digest(PeerId("a")), 1.0, 1.0, 1.0)


class _Directory:
    ttl_s = 60.0

    def __init__(self) -> None:
        self.published: list[NodeStatus] = []

    async def publish(self, status: NodeStatus) -> None:
        self.published.append(status)


async def _announced(measured: Any) -> NodeStatus:
    directory = _Directory()
    announcer = Announcer(directory, FACTS, measured=measured)  # type: ignore[arg-type]
    await announcer.announce("serving", Span(0, 4))
    return directory.published[-1]


async def test_links_are_told() -> None:
    assert (await _announced(lambda: [LINK])).measured == pack_measured([LINK])


@pytest.mark.parametrize(
    "measured",
    [
        lambda: [LINK, LINK],
        lambda: [LINK] * 17,
        lambda: [Measured(LINK.digest, float("nan"), 1.0, 1.0)],
        lambda: [Measured(LINK.digest, 1.0, 1.0, -1e9)],
        lambda: [1 / 0],
    ],
    ids=["twice", "many", "nan", "too small", "raises"],
)
async def test_node_announces_itself_although_its_links_cannot_be_told(measured: Any) -> None:
    assert (await _announced(measured)).measured == b""
