"""What the nodes of a chain are told when it is mended, and when it is mended at all."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from nesa_node.client.session.base import RowSlice
from nesa_node.client.session.hop import HopLink, LinkState
from nesa_node.client.session.route import SessionRoute
from nesa_node.core.errors import MissingBlocksError, NesaError, PeerUnreachableError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p.transport import Transport
from nesa_node.swarm.protocol.messages import Link
from tests.client.scripted_nodes import ScriptedRoute, request
from tests.client.session.test_step_pipeline import hidden, opened


async def test_the_node_before_a_newcomer_sends_what_that_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    route: Any = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    await route.rebuild([0])
    first, newcomer, last = route.links
    told: dict[HopLink, Link] = {}

    async def link(to: HopLink, message: Link, _: object) -> None:
        told[to] = message

    monkeypatch.setattr(route, "_link_hop", link)
    await route._link_hops(route.links, {newcomer: (2,)}, [5], lambda _: False)
    assert [told[each].lengths for each in (first, newcomer, last)] == [(5,), (2,), (5,)]
    assert [told[each].emit_from for each in (first, newcomer)] == [(2,), (5,)]
    await route.close()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_slow_node_is_left_for_none_that_failed_and_a_leaving_one_is(leaves: bool) -> None:
    route: Any = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    await route.rebuild([0])
    route._swarm = MagicMock()
    route._swarm.transport.check_alive_during = nullcontext
    route.selector.plan_hops = AsyncMock(
        side_effect=MissingBlocksError([(1, 2)], "all have failed")
    )
    link = route.links[1]
    link.state = LinkState.LEAVING if leaves else LinkState.TOO_SLOW
    with pytest.raises(MissingBlocksError):
        await SessionRoute.rebuild(route, [0], drop=frozenset({link.hop.peer_id}))
    assert route.selector.plan_hops.await_args.kwargs["exclude_suspects"] is not leaves
    await route.close()


async def test_a_look_that_ends_with_libp2ps_daemon_is_that_error_and_no_cancellation() -> None:
    """The swarm is closed beside the session then, and with it what the session waits for."""
    route: Any = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    daemon: Any = SimpleNamespace(exited=asyncio.Event())
    route._swarm = MagicMock(transport=Transport(PeerId("client"), daemon, daemon, daemon))

    async def closed(*_: object, **__: object) -> None:
        daemon.exited.set()
        look = asyncio.create_task(asyncio.sleep(60))
        look.cancel()
        await look

    route.selector.plan_hops = closed
    with pytest.raises(SwarmError, match="p2pd"):
        await SessionRoute.rebuild(route, [0])
    await route.close()


@pytest.mark.parametrize("error", [MissingBlocksError([(1, 2)], "none"), PeerUnreachableError("x")])
async def test_a_slow_node_is_kept_where_the_move_off_it_fails(
    monkeypatch: pytest.MonkeyPatch, error: NesaError
) -> None:
    async with opened(monkeypatch, "star") as (session, route):
        again = route.rebuild

        async def rebuild(*args: Any, drop: frozenset[PeerId], **options: Any) -> None:
            if drop:
                raise error
            await again(*args, **options)

        monkeypatch.setattr(route, "rebuild", rebuild)
        route.links[1].state = LinkState.TOO_SLOW
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert route.links[1].state is LinkState.SERVING
