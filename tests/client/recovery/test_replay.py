"""What a star keeps of what it sent to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nesa_node.client.recovery.retry import StepReplay
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chains import Hop
from tests.client.scripted_nodes import request


class ScriptedLink:
    is_audited = False

    def __init__(self, hop: Hop) -> None:
        self.hop = hop


class ScriptedRoute:
    """Over spans that a test names. `lacking` says after which blocks the last rebuild lacked what
    had gone into the next ones."""

    def __init__(self) -> None:
        self.held_tokens: dict[Any, tuple[int, ...]] = {}
        self.links: list[Any] = []
        self.lacking: list[int] = []
        self.next: Sequence[tuple[int, int]] = ()

    @property
    def hops(self) -> list[Hop]:
        return [link.hop for link in self.links]

    async def rebuild(self, *_: object, needs_output: Callable[[Hop], bool], **__: object) -> None:
        hops = [Hop(PeerId(f"{ends}"), Span(*ends)) for ends in self.next]
        self.links = [ScriptedLink(hop) for hop in hops]
        self.lacking = [hop.span.end for hop in hops if needs_output(hop)]


async def test_inputs_of_blocks_that_began_no_hop_for_a_while_are_not_taken_for_complete() -> None:
    route: Any = ScriptedRoute()
    replay = StepReplay(route, request("star", rows=1, hops=4), None)  # type: ignore[arg-type]
    lacking = []
    for route.next in ([(0, 2), (2, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 4)]):
        await replay.rebuild([0])
        lacking.append(route.lacking)
    assert lacking == [[2], [], [1], [2]]
