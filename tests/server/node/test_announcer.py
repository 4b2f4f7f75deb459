"""What a node tells of itself, whatever happens to the parts that it could leave out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId, Span
from nesa_node.server.node import announcer as announcer_module
from nesa_node.server.node.announcer import Announcer, Capacity, NodeFacts
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.topology.links.matrix import MeasuredLink, pack_links, peer_digest
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures, pack_roofline
from tests.swarm.local_swarm import eventually

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
    operator="one",
)
LINK = MeasuredLink(peer_digest(PeerId("a")), 1.0, 1.0, 1.0)


class _Directory:
    ttl_s = 60.0
    is_stored = True

    def __init__(self) -> None:
        self.published: list[NodeStatus] = []

    async def publish(self, status: NodeStatus) -> None:
        self.published.append(status)


async def _announced(measured: Any) -> NodeStatus:
    directory = _Directory()
    announcer = Announcer(directory, FACTS, measured_links=measured)  # type: ignore[arg-type]
    await announcer.announce("serving", Span(0, 4))
    return directory.published[-1]


async def test_links_and_the_operator_are_told() -> None:
    status = await _announced(lambda: [LINK])
    assert (status.measured, status.operator) == (pack_links([LINK]), "one")


@pytest.mark.parametrize(
    "measured",
    [
        lambda: [LINK, LINK],
        lambda: [LINK] * 17,
        lambda: [MeasuredLink(LINK.digest, float("nan"), 1.0, 1.0)],
        lambda: [MeasuredLink(LINK.digest, 1.0, 1.0, -1e9)],
        lambda: [1 / 0],
    ],
    ids=["twice", "many", "nan", "too small", "raises"],
)
async def test_node_announces_itself_although_its_links_cannot_be_told(measured: Any) -> None:
    assert (await _announced(measured)).measured == b""


async def test_record_is_renewed_rarely_and_news_are_told_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer_module, "CHECK_INTERVAL_S", 0.02)
    directory = _Directory()
    directory.ttl_s = 0.6
    links = [LINK]
    capacity = Capacity(free_tokens=100, load=0.0)
    announcer = Announcer(directory, FACTS, measured_links=lambda: links)  # type: ignore[arg-type]
    announcer.capacity = lambda: capacity
    await announcer.announce("serving", Span(0, 4))
    running = asyncio.create_task(announcer.run())
    await asyncio.sleep(1.0)
    quiet = len(directory.published)
    assert 2 <= quiet <= 1 + 1.0 / 0.15, "every 0.2 s"
    directory.ttl_s = 3600.0
    # A little more load and the same links, measured again, are no news.
    capacity = Capacity(free_tokens=100, load=0.01)
    links = [replace(LINK, rtt_ms=2.0, age_s=5.0)]
    await asyncio.sleep(0.3)
    assert len(directory.published) <= quiet + 1
    for capacity in (
        Capacity(free_tokens=99),
        Capacity(free_tokens=99, load=0.5),
        Capacity(free_tokens=99, load=0.5, tokens=1),
    ):
        told = await _next(directory)
        assert (told.free_cache_tokens, told.load, told.tokens) == (
            capacity.free_tokens,
            capacity.load,
            capacity.tokens,
        )
    links = [LINK, replace(LINK, digest=peer_digest(PeerId("b")))]
    assert (await _next(directory)).measured == pack_links(links)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _next(directory: _Directory) -> NodeStatus:
    """What is published next."""
    before = len(directory.published)

    async def came() -> bool:
        return len(directory.published) > before

    await eventually(came)
    return directory.published[-1]


async def test_record_that_could_not_be_published_is_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer_module, "CHECK_INTERVAL_S", 0.02)
    directory = _Directory()
    failures = iter([OSError("too many open files"), SwarmError("no"), None])

    async def publish(status: NodeStatus) -> None:
        if (failure := next(failures)) is not None:
            raise failure
        directory.published.append(status)

    directory.publish = publish  # type: ignore[method-assign]
    announcer = Announcer(directory, FACTS)  # type: ignore[arg-type]
    await announcer.announce("serving", Span(0, 4))
    running = asyncio.create_task(announcer.run())
    assert (await _next(directory)).state == "serving"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_the_dht_did_not_take_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer_module, "CHECK_INTERVAL_S", 0.02)
    directory = _Directory()
    directory.is_stored = False
    announcer = Announcer(directory, FACTS)  # type: ignore[arg-type]
    await announcer.announce("serving", Span(0, 4))
    running = asyncio.create_task(announcer.run())
    for _ in range(3):
        await _next(directory)
    directory.is_stored = True
    await _next(directory)
    told = len(directory.published)
    await asyncio.sleep(0.3)
    assert len(directory.published) <= told + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "roofline", [None, Roofline(WeightFigures(0.0, 1e9, 1e12), BlockWork(1e7, 1e7))]
)
async def test_figures_are_told_where_there_are_some(roofline: Roofline | None) -> None:
    directory = _Directory()
    facts = replace(FACTS, roofline=roofline)
    announcer = Announcer(directory, facts, measured_links=list)  # type: ignore[arg-type]
    await announcer.announce("joining", Span(0, 4))
    assert directory.published[-1].figures == pack_roofline(roofline)
