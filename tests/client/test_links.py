"""What the nodes of a chain are told when it is mended."""

from __future__ import annotations

from typing import Any

import pytest

from nesa_node.client.hop import HopLink
from nesa_node.swarm.messages import Link
from tests.client.scripted_nodes import ScriptedRoute, request


async def test_the_node_before_a_newcomer_sends_what_that_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    route: Any = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    await route.rebuild([0])
    first, newcomer, last = route.links
    told: dict[HopLink, Link] = {}

    async def link(to: HopLink, message: Link, _: object) -> None:
        told[to] = message

    monkeypatch.setattr(route, "_link", link)
    await route._link_all(route.links, {newcomer: (2,)}, [5], lambda _: False)
    assert [told[each].lengths for each in (first, newcomer, last)] == [(5,), (2,), (5,)]
    assert [told[each].emit_from for each in (first, newcomer)] == [(2,), (5,)]
    await route.close()
