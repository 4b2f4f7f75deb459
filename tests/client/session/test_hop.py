"""No stream stays open, whenever its closing is cancelled; unanswered pings are bounded."""

from __future__ import annotations

import asyncio

import pytest

from nesa_node.client.session.hop import MAX_PENDING_PINGS, TRANSITIONS, HopLink, LinkState
from nesa_node.client.session.route import SessionRoute
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.protocol.messages import Leaving, Message, Received
from nesa_node.swarm.protocol.stream import MessageBudget
from tests.client.scripted_nodes import ScriptedNode, ScriptedRoute, request
from tests.turns import turns_of_the_loop


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> list[Pipe]:
    """Those of all links."""
    made: list[Pipe] = []
    make = HopLink.__init__

    def init(link: HopLink, *args: object) -> None:
        make(link, *args)  # type: ignore[arg-type]
        made.append(link._stream._writer)

    monkeypatch.setattr(HopLink, "__init__", init)
    return made


async def cancelled_after(turns: int, task: asyncio.Task[None]) -> None:
    """Cancel `task` when the loop has gone round so often."""
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def all_closed(pipes: list[Pipe]) -> None:
    async with asyncio.timeout(5):
        for pipe in pipes:
            await pipe.wait_closed()


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_link_is_closed_when_closing_it_is_cancelled(
    pipes: list[Pipe], is_lost: bool, turns: int
) -> None:
    node = ScriptedNode(0, 1, dies_after=None, step_s=0)
    link = await node.link(lambda: None)
    if is_lost:
        link.fail("it was busy")
    task = asyncio.create_task(link.close())
    # A task that was cancelled before it began has done nothing.
    await cancelled_after(turns + 1, task)
    await all_closed(pipes)
    await node.close()


@pytest.mark.parametrize("turns", range(10))
async def test_a_route_is_closed_when_closing_it_is_cancelled(
    pipes: list[Pipe], turns: int
) -> None:
    route = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    await route.rebuild([0])
    task = asyncio.create_task(SessionRoute.close(route))  # its own also ends the nodes
    await cancelled_after(turns + 1, task)
    assert len(pipes) == 3
    await all_closed(pipes)
    await route.close()


async def test_a_node_that_answers_no_ping_is_lost_after_a_number_of_them() -> None:
    node = ScriptedNode(0, 1, dies_after=None, step_s=0)
    link = await node.link(lambda: None)
    node.hang()
    for nonce in range(MAX_PENDING_PINGS + 1):
        await link.probe(nonce, 0.0)
    assert link.failure is not None
    assert "answers no pings" in link.failure.reason
    await link.close()
    await node.close()


@pytest.mark.parametrize(
    ("message", "may_be_said_at_once"),
    [(Leaving(seconds=1.0), 2000), (Received(nbytes=1 << 17, seconds=0.1), 20_000)],
)
async def test_what_a_node_says_unasked_leaves_turns_to_all_else_and_is_counted(
    message: Message, may_be_said_at_once: int
) -> None:
    number, heard, all_heard = 500, 0, asyncio.Event()
    node = ScriptedNode(0, 1, dies_after=None, step_s=0)

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard == number:
            all_heard.set()

    link = await node.link(hear)
    link._budget = budget = MessageBudget(lambda: 100.0)
    async with turns_of_the_loop() as turns, asyncio.timeout(10):
        for _ in range(number):
            await node.stream.send(message)
        await all_heard.wait()
        assert turns[0] >= number
    assert link.failure is None
    left = may_be_said_at_once - number
    assert not any(budget.charge(link.hop.peer_id, message) for _ in range(left - 10))
    assert any(budget.charge(link.hop.peer_id, message) for _ in range(20))
    await link.close()
    await node.close()


@pytest.mark.parametrize("state", LinkState)
def test_a_link_never_serves_again_once_it_leaves_is_lost_or_closed(state: LinkState) -> None:
    allowed = TRANSITIONS[state]
    assert state not in allowed
    if state in (LinkState.LEAVING, LinkState.LOST, LinkState.CLOSED):
        assert not allowed & {LinkState.SERVING, LinkState.TOO_SLOW}
    assert (LinkState.CLOSED in allowed) is (state is not LinkState.CLOSED)
