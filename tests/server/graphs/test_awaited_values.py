"""Values that nodes send each other for a request, in any order, or in vain."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.server.graphs import awaited_values
from nesa_node.server.graphs.awaited_values import AwaitedValues
from nesa_node.swarm.protocol.graph_messages import GraphValues, SourceNode
from nesa_node.swarm.protocol.graph_values import encode_values

A, B = PeerId("a"), PeerId("b")
KEY, OTHER = bytes(16), bytes([1]) * 16


def source(peer: str, *values: int, key: bytes = KEY) -> SourceNode:
    return SourceNode(peer, key, values)


def hold(
    awaited: AwaitedValues, sender: PeerId, values: dict[int, torch.Tensor], key: bytes = KEY
) -> asyncio.Task[None]:
    metas, payload = encode_values(values)
    return asyncio.create_task(
        awaited.hold(sender, GraphValues(key=key, values=metas), payload), name="hold"
    )


async def claim(awaited: AwaitedValues, *sources: SourceNode) -> dict[int, torch.Tensor]:
    async with awaited.claim(sources) as values:
        return values


async def refusal(awaited: AwaitedValues, *sources: SourceNode) -> str:
    with pytest.raises(ProtocolError) as caught:
        async with asyncio.timeout(5):
            await claim(awaited, *sources)
    return caught.value.code


async def test_values_come_before_and_after_their_request() -> None:
    awaited = AwaitedValues()
    early = hold(awaited, A, {1: torch.ones(1)})

    async def come() -> None:
        await asyncio.sleep(0.05)
        await hold(awaited, B, {2: torch.ones(2), 3: torch.ones(3)})

    late = asyncio.create_task(come())
    async with awaited.claim((source("a", 1), source("b", 3, 2))) as values:
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
    await hold(awaited, A, {1: torch.ones(1)})
    assert not len(awaited)
    assert await refusal(awaited, source("a", 1, key=OTHER)) == "values_missing"
    assert not len(awaited)


async def test_request_that_comes_too_late_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_values, "CLAIM_S", 0.05)
    awaited = AwaitedValues()
    await hold(awaited, A, {1: torch.ones(1)})
    assert await refusal(awaited, source("a", 1)) == "values_missing"
    gone = hold(awaited, B, {1: torch.ones(1)})
    await asyncio.sleep(0)
    gone.cancel()  # its stream has ended
    await asyncio.wait({gone})
    assert await refusal(awaited, source("b", 1)) == "values_missing"
    assert not len(awaited)


async def test_values_that_are_in_use_stay_accounted_for_though_their_sender_leaves() -> None:
    awaited = AwaitedValues()
    holding = hold(awaited, A, {1: torch.ones(1)})
    async with awaited.claim((source("a", 1),)):
        holding.cancel()
        await asyncio.wait({holding}, timeout=0.05)
        assert not holding.done()
    await asyncio.wait({holding}, timeout=5)
    assert holding.cancelled()
    assert not len(awaited)


async def test_values_of_another_node_are_not_taken_for_those_of_the_named_one() -> None:
    awaited = AwaitedValues()
    forged = hold(awaited, B, {1: torch.zeros(1)})
    await asyncio.sleep(0)
    right = hold(awaited, A, {1: torch.ones(1)})
    assert (await claim(awaited, source("a", 1)))[1] == 1
    await right
    forged.cancel()
    await asyncio.wait({forged})
    assert not len(awaited)


async def test_values_that_a_request_has_are_no_other_ones() -> None:
    awaited = AwaitedValues()
    holding = hold(awaited, A, {1: torch.ones(1)})
    async with awaited.claim((source("a", 1),)) as values:
        assert await refusal(awaited, source("a", 1)) == "unexpected"
        assert values[1] == 1
        assert not holding.done()
    await holding


@pytest.mark.parametrize("values", [{}, {2: torch.ones(1)}, {1: torch.ones(1), 2: torch.ones(1)}])
async def test_other_values_than_the_request_names(values: dict[int, torch.Tensor]) -> None:
    awaited = AwaitedValues()
    holding = hold(awaited, A, values)
    assert await refusal(awaited, source("a", 1)) == "bad_tensor"
    await holding


async def test_values_that_come_twice() -> None:
    awaited = AwaitedValues()
    first = hold(awaited, A, {1: torch.ones(1)})
    await asyncio.sleep(0)
    with pytest.raises(ProtocolError) as caught:
        await hold(awaited, A, {1: torch.zeros(1)})
    assert caught.value.code == "unexpected"
    assert (await claim(awaited, source("a", 1)))[1] == 1
    await first


async def test_one_sender_has_not_too_many_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_values, "MAX_HELD_PER_PEER", 2)
    awaited = AwaitedValues()
    keys = [bytes([number]) * 16 for number in range(3)]
    claiming = asyncio.create_task(refusal(awaited, source("a", 1, key=keys[2])))
    await asyncio.sleep(0)
    held = [hold(awaited, A, {1: torch.ones(1)}, key) for key in keys]
    assert await claiming == "values_missing"
    with pytest.raises(ProtocolError, match="2 requests"):
        await held[2]
    for key in keys[:2]:
        await claim(awaited, source("a", 1, key=key))
    await asyncio.gather(*held[:2])
    assert not len(awaited)
