"""A node that does not open a session is given up early only where another could take its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from nesa_node.client.session import hop_opening
from nesa_node.client.session.base import PrefixStart
from nesa_node.client.session.hop import HopLink
from nesa_node.client.session.hop_opening import HopOpener
from nesa_node.core.errors import NoAddressError, PeerUnreachableError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chains import Hop
from tests.client.scripted_nodes import ScriptedNode, ScriptedSearch, request

HOPS = tuple(Hop(PeerId(f"node-{block}"), Span(block, block + 1)) for block in range(2))
SILENT_S = 0.2


class KnownNodes:
    def __init__(self) -> None:
        self.suspected: list[PeerId] = []
        self.told: list[PeerId] = []

    def record_failure(self, peer: PeerId, *_: Any, report: bool = True) -> None:
        self.suspected.append(peer)
        if report:
            self.told.append(peer)


class ScriptedOpener(HopOpener):
    """Nodes need so many seconds each to open."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.known = KnownNodes()
        wanted = request("chain", rows=1, hops=len(HOPS))
        beginning = PrefixStart(1, ())
        super().__init__(cast(Any, None), wanted, cast(Any, self.known), beginning, lambda: None)
        self.scripted = [
            ScriptedNode(block, 1, dies_after=None, step_s=0) for block in range(len(HOPS))
        ]
        self._seconds = seconds

    async def open_hop(self, hop: Hop, *_: Any, **__: Any) -> HopLink:
        await asyncio.sleep(self._seconds[hop.span.start])
        return await self.scripted[hop.span.start].link(lambda: None)

    async def open_both(self, *, finds: bool) -> dict[Hop, HopLink]:
        addresses = {hop.peer_id: () for hop in HOPS}
        return await self.open_hops(HOPS, {}, addresses, 1, 10.0, ScriptedSearch(finds))


@asynccontextmanager
async def opener(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> AsyncIterator[ScriptedOpener]:
    monkeypatch.setattr(hop_opening, "OPEN_SILENCE_S", SILENT_S)
    opening = ScriptedOpener(seconds)
    try:
        yield opening
    finally:
        for node in opening.scripted:
            await node.close()


async def test_silent_node_is_given_up_where_another_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opener(monkeypatch, 0.0, 60.0) as opening:
        began = time.monotonic()
        with pytest.raises(PeerUnreachableError, match="node-1 did not open the session"):
            await opening.open_both(finds=True)
        assert SILENT_S <= time.monotonic() - began < 2.0
        assert opening.known.suspected == [HOPS[1].peer_id]
        assert opening.unreached_spans == (HOPS[1].span,)


async def test_slow_node_is_waited_for_where_no_other_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opener(monkeypatch, 0.0, 4 * SILENT_S) as opening:
        opened = await opening.open_both(finds=False)
        assert set(opened) == set(HOPS)
        assert opening.known.suspected == []
        await hop_opening.close_links(list(opened.values()))


async def test_openings_that_are_cancelled_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opener(monkeypatch, 0.0, 60.0) as opening:
        task = asyncio.create_task(opening.open_both(finds=False))
        await asyncio.sleep(2 * SILENT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "hop-link"]


@pytest.mark.parametrize(("error", "told"), [(PeerUnreachableError, 1), (NoAddressError, 0)])
async def test_others_hear_of_a_node_that_does_not_answer_and_not_of_an_unknown_name(
    error: type[PeerUnreachableError], told: int
) -> None:
    known = KnownNodes()
    transport = SimpleNamespace(open_stream=AsyncMock(side_effect=error("no stream")))
    wanted = request("chain", rows=1, hops=len(HOPS))
    swarm = cast(Any, SimpleNamespace(transport=transport))
    opening = HopOpener(swarm, wanted, cast(Any, known), PrefixStart(1, ()), lambda: None)
    with pytest.raises(error):
        await opening.open_hop(HOPS[0], None, (), 1, 1.0)
    assert known.suspected == [HOPS[0].peer_id]
    assert len(known.told) == told
