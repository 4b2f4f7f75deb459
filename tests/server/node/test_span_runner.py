"""What a wish for other blocks is refused for. Whole moves: `tests/faults/test_moving.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from nesa_node.core.ids import PeerId, Span
from nesa_node.server.node.move_limiter import MoveLimiter
from nesa_node.server.node.shutdown import Shutdown
from nesa_node.server.node.span_runner import SpanRunner
from nesa_node.topology.snapshot import Snapshot
from tests.server.small_swarm import BLOCKS, EVEN, ME, UNEVEN, C, swarm

WEIGHTS = 123_456


class _Announcer:
    def __init__(self) -> None:
        self.told: list[tuple[str, Span, Span | None]] = []

    async def announce(self, state: str, span: Span, *, next_span: Span | None = None) -> None:
        self.told.append((state, span, next_span))


class _Node:
    """A node that serves `span` and sees `snapshots`, one after another."""

    def __init__(self, peer: PeerId, span: Span, snapshots: Iterator[Snapshot]) -> None:
        async def look(*_: object) -> Snapshot:
            return next(snapshots)

        self.regained: list[int] = []
        self.announcer = _Announcer()
        identity = SimpleNamespace(peer_id=peer)
        network: Any = SimpleNamespace(
            identity=identity,
            directory=SimpleNamespace(fetch=look),
            transport=SimpleNamespace(daemon_exited=asyncio.Event()),
        )
        self._part = SimpleNamespace(span=span, weight_bytes=WEIGHTS)
        self._spans = SpanRunner(
            config=cast(Any, None),
            served=cast(
                Any,
                SimpleNamespace(
                    model_id="tiny", num_blocks=BLOCKS, require_memory=self._require_memory
                ),
            ),
            swarm=network,
            scheduler=cast(Any, None),
            announcer=cast(Any, self.announcer),
            move_limiter=MoveLimiter(per_hour=4, pause_s=0),
            shutdown=Shutdown(asyncio.Event(), network.transport),
            open_span=cast(Any, None),
        )

    async def ask(self, span: Span) -> str:
        wish = self._spans.move_limiter.request_move(span, "a test")
        return await self._spans._try_grant(wish, cast(Any, self._part))

    def _require_memory(self, *_: object, regained_bytes: int = 0) -> None:
        self.regained.append(regained_bytes)


async def test_new_blocks_take_the_room_of_those_that_are_given_up() -> None:
    now = swarm(UNEVEN)
    node = _Node(ME, Span(0, 4), iter([now, now]))
    assert await node.ask(Span(4, 8)) == "granted"
    assert node.regained == [WEIGHTS]
    assert node.announcer.told == [("draining", Span(0, 4), Span(4, 8))]


async def test_last_two_holders_do_not_both_give_their_blocks_up() -> None:
    """Each relied on the other; the one that announced last sees that the other has gone."""
    both = swarm(EVEN)
    alone = swarm({peer: span for peer, span in EVEN.items() if peer != C})
    other = next(peer for peer, span in EVEN.items() if span == EVEN[C] and peer != C)
    node = _Node(other, Span(4, 8), iter([both, alone]))
    assert await node.ask(Span(0, 4)) == "uncovered"
    assert [state for state, *_ in node.announcer.told] == ["draining", "serving"]


async def test_blocks_without_another_holder_are_not_given_up() -> None:
    node = _Node(C, Span(4, 8), iter([swarm(UNEVEN)]))
    assert await node.ask(Span(0, 4)) == "uncovered"
    assert node.announcer.told == []
