"""Who is asked, and counts as found, while a hop is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.client.recovery import failure_detector as replacements
from nesa_node.client.recovery.failure_detector import ReplacementSearch
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chains import Hop
from nesa_node.topology.snapshot import NodeState, Snapshot

FIRST, SECOND = Hop(PeerId("first"), Span(0, 2)), Hop(PeerId("second"), Span(2, 4))
HOPS = (FIRST, SECOND)
GONE = frozenset({SECOND.peer_id})


class KnownNodes:
    """What a search needs of `Nodes`: blocks 2 and 3 can be filled by one node that has both."""

    def __init__(self, *holders: str) -> None:
        spans = {"first": (0, 2), "second": (2, 4)} | dict.fromkeys(holders, (2, 4))
        self.nodes = tuple(NodeState(PeerId(name), Span(*span)) for name, span in spans.items())
        self.avoided: set[PeerId] = set()

    async def fetch_from_one_member(self) -> Snapshot:
        return Snapshot(ModelId("tiny@0"), 4, self.nodes, taken_at=0.0)

    async def can_fill(
        self, _: Snapshot, keep: Sequence[Hop], answered: Collection[PeerId]
    ) -> bool:
        return FIRST in keep and bool(answered)

    def exclude_for_a_while(self, peers: Iterable[PeerId]) -> None:
        self.avoided |= set(peers)


@asynccontextmanager
async def searching(
    monkeypatch: pytest.MonkeyPatch, answers_s: dict[str, float]
) -> AsyncIterator[tuple[ReplacementSearch, KnownNodes, list[PeerId]]]:
    """A search among holders that answer after so long; the third are those that were asked."""
    asked: list[PeerId] = []

    async def ping(_: Any, peer: PeerId, *__: Any, timeout_s: float, pings: int) -> float:
        asked.append(peer)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(answers_s[peer])
        except TimeoutError:
            raise PeerUnreachableError(peer) from None
        return 1.0

    monkeypatch.setattr(replacements, "ping", ping)
    swarm = SimpleNamespace(rtts=SimpleNamespace(rtt_ms=lambda _: 1.0), transport=None)
    known = KnownNodes(*answers_s)
    search = ReplacementSearch(swarm, known)  # type: ignore[arg-type]
    try:
        yield search, known, asked
    finally:
        await search.close()


async def until_found(search: ReplacementSearch) -> float:
    began = time.monotonic()
    async with asyncio.timeout(10):
        while not search.has_found:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.005)
    return time.monotonic() - began


async def test_first_answer_wins_over_a_region_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {f"cut-{number}": 1e9 for number in range(6)}
    async with searching(monkeypatch, {**cut, "there": 0.05}) as (search, known, asked):
        search.start(HOPS, GONE)
        assert await until_found(search) < 1.0
        assert set(asked) == {*cut, "there"}, "neither the chain's own nor one after another"
        search.exclude_unreachable()
        assert known.avoided == set(cut)


async def test_nothing_is_found_where_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "CANDIDATE_PING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(replacements, "SEARCH_INTERVAL_S", 0.05)
    async with searching(monkeypatch, {"cut": 1e9}) as (search, _, asked):
        search.start(HOPS, GONE)
        await asyncio.sleep(0.5)
        assert not search.has_found
        assert len(asked) > 2, "it is asked again"


async def test_search_for_more_silent_hops_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with searching(monkeypatch, {"there": 0.0}) as (search, _, asked):
        search.start(HOPS, GONE)
        await until_found(search)
        search.start(HOPS, frozenset({FIRST.peer_id, SECOND.peer_id}))
        await asyncio.sleep(0.1)
        assert not search.has_found, "nothing that is kept can be joined"
        assert asked == ["there"]


async def test_search_that_ended_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "SEARCH_INTERVAL_S", 0.01)
    async with searching(monkeypatch, {"cut": 1e9}) as (search, _, asked):
        search.start(HOPS, GONE)
        await asyncio.sleep(0.05)
        search.stop()
        count = len(asked)
        await asyncio.sleep(0.1)
        assert len(asked) == count
        assert search.silent_peers == frozenset()


async def test_closing_waits_for_a_search_that_ended_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pings hold streams until they have heard that they are cancelled."""
    pinging, ended = asyncio.Event(), asyncio.Event()

    async def ping(*_: Any, **__: Any) -> float:
        pinging.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.set()
        return 1.0

    async with searching(monkeypatch, {"there": 0.0}) as (search, _, _):
        monkeypatch.setattr(replacements, "ping", ping)
        search.start(HOPS, GONE)
        await pinging.wait()
        search.stop()
        await search.close()
        assert ended.is_set()
