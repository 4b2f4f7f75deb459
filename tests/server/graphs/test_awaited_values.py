"""Values that nodes send each other for a request, in any order, or in vain."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.server.graphs import awaited_values
from nesa_node.server.graphs.awaited_values import AwaitedValues
from nesa_node.swarm.protocol.graph_messages import SourceNode

A, B = PeerId("a"), PeerId("b")
KEY = bytes(16)


async def test_values_come_before_and_after_their_request() -> None:
    awaited = AwaitedValues()
    early = asyncio.create_task(awaited.hold(KEY, A, {1: torch.ones(1)}))
    await asyncio.sleep(0)

    async def come() -> None:
        await asyncio.sleep(0.05)
        await awaited.hold(KEY, B, {2: torch.ones(2), 3: torch.ones(3)})

    late = asyncio.create_task(come())
    async with awaited.claim(KEY, (SourceNode("a", (1,)), SourceNode("b", (3, 2)))) as values:
        assert sorted(values) == [1, 2, 3]
        await asyncio.sleep(0.05)
        assert not early.done()
        assert not late.done()
    await asyncio.gather(early, late)
    assert not len(awaited)


async def test_values_without_request_and_requests_without_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(awaited_values, "CLAIM_S", 0.05)
    monkeypatch.setattr(awaited_values, "MAX_WAIT_S", 0.05)
    awaited = AwaitedValues()
    await awaited.hold(KEY, A, {1: torch.ones(1)})
    with pytest.raises(ProtocolError) as caught:
        async with awaited.claim(KEY, (SourceNode("a", (1,)),)):
            pass
    assert caught.value.code == "values_missing"
    assert not len(awaited)


async def test_values_of_another_node_are_not_taken_for_those_of_the_named_one() -> None:
    awaited = AwaitedValues()
    forged = asyncio.create_task(awaited.hold(KEY, B, {1: torch.zeros(1)}))
    await asyncio.sleep(0)
    right = asyncio.create_task(awaited.hold(KEY, A, {1: torch.ones(1)}))
    async with awaited.claim(KEY, (SourceNode("a", (1,)),)) as values:
        assert values[1] == 1
    await right
    forged.cancel()
    await asyncio.wait({forged})
    assert not len(awaited)


@pytest.mark.parametrize("values", [{}, {2: torch.ones(1)}, {1: torch.ones(1), 2: torch.ones(1)}])
async def test_other_values_than_the_request_names(values: dict[int, torch.Tensor]) -> None:
    awaited = AwaitedValues()
    holding = asyncio.create_task(awaited.hold(KEY, A, values))
    with pytest.raises(ProtocolError) as caught:
        async with awaited.claim(KEY, (SourceNode("a", (1,)),)):
            pass
    assert caught.value.code == "bad_tensor"
    await holding


async def test_values_that_come_twice() -> None:
    awaited = AwaitedValues()
    first = asyncio.create_task(awaited.hold(KEY, A, {1: torch.ones(1)}))
    await asyncio.sleep(0)
    with pytest.raises(ProtocolError) as caught:
        await awaited.hold(KEY, A, {1: torch.zeros(1)})
    assert caught.value.code == "unexpected"
    async with awaited.claim(KEY, (SourceNode("a", (1,)),)) as values:
        assert values[1] == 1
    await first
