"""Chunks of a step flow through scripted nodes: all at work, in order, done once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from nesa_node.client.recovery import retry as patience
from nesa_node.client.recovery import suspicion
from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session import hop
from nesa_node.client.session import session as session_module
from nesa_node.client.session.base import RowSlice
from nesa_node.client.session.hop import LinkState
from nesa_node.client.session.session import RemoteSession
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.choices import RouteName as Routing
from nesa_node.swarm.protocol.messages import Opened as OpenedMessage
from tests.client.scripted_nodes import HIDDEN, NO_SWARM, RNG, ScriptedRoute, Spoil, request

HOPS = 3
ROUTINGS: tuple[Routing, ...] = ("chain", "star")

Opened = tuple[RemoteSession, ScriptedRoute]


@asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch,
    mode: Routing,
    *,
    rows: int = 1,
    step_timeout_s: float = 0.5,
    **script: Any,
) -> AsyncIterator[Opened]:
    """An open session over scripted nodes."""
    routes: list[ScriptedRoute] = []

    def route(
        _: Any, wanted: RouteRequest, __: Any, on_change: Callable[[], None], suspicions: Any
    ) -> Any:
        routes.append(ScriptedRoute(wanted, on_change, suspicions=suspicions, **script))
        return routes[0]

    monkeypatch.setattr(session_module, "SessionRoute", route)
    timeouts = {"recovery_timeout_s": 5.0, "queue_timeout_s": 5.0}
    session = RemoteSession(
        NO_SWARM,
        request(mode, rows=rows, hops=HOPS, step_timeout_s=step_timeout_s, **timeouts),
        ChainPlanner(NO_SWARM),
        OpenLimiter(),
        rng=RNG,
    )
    try:
        await session.open()
        yield session, routes[0]
    finally:
        await session.close()


def hidden(tokens: int) -> torch.Tensor:
    return torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_all_hops_work_on_a_long_step_at_once(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode, step_s=0.01) as (session, route):
        output_TD = await session.step(hidden(2000), [RowSlice(0, 0, 2000)])
        assert torch.equal(output_TD, hidden(2000) + HOPS)
        assert route.at_work == HOPS
        assert session.lengths == (2000,)
        steps = [[step.step for step in node.steps] for node in route.scripted]
        assert steps[0] == steps[1] == steps[2] == sorted(steps[0])
        assert len(steps[0]) == 16


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_many_rows_flow_as_micro_batches(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    counts = [90, 10, 700, 1, 64]
    rows = [RowSlice(row, 0, count) for row, count in enumerate(counts)]
    async with opened(monkeypatch, mode, rows=5, step_s=0.005) as (session, route):
        output_BD = await session.step(hidden(sum(counts)), rows, want="last")
        ends = torch.tensor(counts).cumsum(0) - 1
        assert torch.equal(output_BD, hidden(sum(counts))[ends] + HOPS)
        assert session.lengths == tuple(counts)
        assert route.at_work == HOPS
        one_each = [RowSlice(row, count, 1) for row, count in enumerate(counts)]
        await session.step(hidden(5), one_each, want="last")
        assert route.scripted[0].steps[-1].rows == tuple(one_each)


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_only_acknowledgements_come_back_for_chunks_without_a_last_token(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode) as (session, route):
        output_TD = await session.step(hidden(1000), [RowSlice(0, 0, 1000)], want="last")
        assert torch.equal(output_TD, hidden(1000)[-1:] + HOPS)
        assert [step.want for step in route.scripted[-1].steps] == ["none"] * 7 + ["last"]


@pytest.mark.parametrize("dies_after", [0, 1, 5, 15])
@pytest.mark.parametrize("block", range(HOPS))
@pytest.mark.parametrize("mode", ROUTINGS)
async def test_chunks_that_came_back_are_not_sent_again_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, mode: Routing, block: int, dies_after: int
) -> None:
    deaths = {block: dies_after}
    async with opened(monkeypatch, mode, deaths=deaths, step_s=0.001) as (session, route):
        output_TD = await session.step(hidden(2000), [RowSlice(0, 0, 2000)])
        assert torch.equal(output_TD, hidden(2000) + HOPS)
        assert session.recoveries == 1
        (done,) = route.rebuilds[-1]
        # The dead node's last steps may have been on their way; none that came back is undone.
        assert dies_after * 125 >= done >= (dies_after - 2 * HOPS) * 125
        assert [node.lengths for node in route.scripted] == [[2000]] * HOPS
        first, survivor = done // 125, route.scripted[(block + 1) % HOPS]
        numbers = [step.rows[0].position // 125 for step in survivor.steps]
        assert [n for n in numbers if n < first] == list(range(first))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda output_TD: output_TD * float("nan"),
        lambda output_TD: output_TD / 0.0,
        lambda output_TD: output_TD[:, :-1],
        lambda output_TD: output_TD.to(torch.float16),
    ],
    ids=["nan", "infinite", "narrow", "coarse"],
)
@pytest.mark.parametrize("mode", ROUTINGS)
async def test_node_whose_outputs_cannot_be_true_is_replaced_and_told_as_wrong(
    monkeypatch: pytest.MonkeyPatch, mode: Routing, spoil: Spoil
) -> None:
    block = HOPS - 1 if mode == "chain" else 1
    async with opened(monkeypatch, mode, spoils={block: spoil}) as (session, route):
        output_TD = await session.step(hidden(5), [RowSlice(0, 0, 5)])
        assert torch.equal(output_TD, hidden(5) + HOPS)
        assert route.faults == [(f"node-{block}", "wrong")]


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_hung_node_is_found_while_others_have_chunks(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    monkeypatch.setattr(hop, "PING_TIMEOUT_S", 0.3)
    async with opened(monkeypatch, mode) as (session, route):
        hung = route.scripted[1]
        hung.hang()
        output_TD = await session.step(hidden(2000), [RowSlice(0, 0, 2000)])
        assert torch.equal(output_TD, hidden(2000) + HOPS)
        assert session.recoveries == 1
        assert hung not in route.scripted
        assert route.scripted[0].steps[0].step == 1, "the first node was kept"


async def test_a_long_step_of_a_node_that_works_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch, "chain", step_s=0.8) as (session, _):
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert session.recoveries == 0


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_silent_node_is_replaced_long_before_a_step_is_overdue(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode, step_timeout_s=60.0) as (session, route):
        hung = route.scripted[1]
        hung.hang()
        began = time.monotonic()
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert 1.0 <= time.monotonic() - began < 3.0
        assert session.recoveries == 1
        assert hung not in route.scripted
        assert session.metrics.suspicions == Counter(raised=1, confirmed=1)


async def test_all_silent_nodes_are_replaced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain with one that says nothing could not be mended."""
    async with opened(monkeypatch, "chain", step_timeout_s=60.0) as (session, route):
        for hung in route.scripted[1:]:
            hung.hang()
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert session.recoveries == 1
        assert route.scripted[0].steps


async def test_silent_node_without_a_replacement_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspicion, "MAX_SILENCE_S", 3.0)
    async with opened(monkeypatch, "chain", step_timeout_s=60.0, finds=False) as (session, route):
        route.scripted[1].hang()
        began = time.monotonic()
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert time.monotonic() - began >= 3.0
        assert session.recoveries == 1


async def test_node_that_the_one_before_cannot_reach_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both answer the client: only what they say of the step tells."""
    async with opened(monkeypatch, "chain", step_timeout_s=60.0) as (session, route):
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        first, second, third = route.scripted
        first.cut_off = second
        began = time.monotonic()
        output_TD = await session.step(hidden(1), [RowSlice(0, 1, 1)])
        assert 1.0 <= time.monotonic() - began < 3.0
        assert torch.equal(output_TD, hidden(1) + HOPS)
        assert route.faults == [("node-1", "stalled")]
        assert (first, third) == (route.scripted[0], route.scripted[2])
        assert second is not route.scripted[1]


async def test_node_before_a_cut_is_replaced_where_the_one_after_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch, "chain", step_timeout_s=60.0) as (session, route):
        route.search.irreplaceable = frozenset({PeerId("node-1")})  # type: ignore[attr-defined]
        route.scripted[0].cut_off = route.scripted[1]
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert route.faults == [("node-0", "stalled")]


async def test_cut_without_a_replacement_is_left_to_the_steps_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch, "chain", step_timeout_s=4.0, finds=False) as (session, route):
        route.scripted[0].cut_off = route.scripted[1]
        began = time.monotonic()
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert time.monotonic() - began >= 4.0
        assert session.recoveries == 1


async def test_silence_behind_a_large_step_may_be_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question waits for the bytes before it."""
    monkeypatch.setattr(hop, "DEFAULT_LINK_BYTES_PER_S", 8.0)
    async with opened(monkeypatch, "chain", step_timeout_s=60.0) as (session, route):
        hung = route.scripted[0]
        hung.hang()
        began = time.monotonic()
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert time.monotonic() - began >= 1.0 + 16 / 8.0
        assert hung not in route.scripted


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_node_that_answers_keeps_its_time_for_a_step(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode, step_s=1.5, step_timeout_s=60.0) as (session, route):
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert session.recoveries == 0
        assert sum(node.pings for node in route.scripted) > HOPS
        assert not session.metrics.suspicions


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_session_whose_replacements_are_busy_lets_go_of_the_others(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    """Another session may hold just those replacements, and wait for what this one holds."""
    monkeypatch.setattr(patience, "PARTIAL_CHAIN_HOLD_S", 0.0)
    async with opened(monkeypatch, mode, deaths={1: 5}, busy=3) as (session, route):
        output_TD = await session.step(hidden(2000), [RowSlice(0, 0, 2000)])
        assert torch.equal(output_TD, hidden(2000) + HOPS)
        assert route.kept_while_busy == [2, 0, 0]
        assert [node.lengths for node in route.scripted] == [[2000]] * HOPS


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_a_rollback_begins_an_epoch_and_needs_no_recovery(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode) as (session, route):
        await session.step(hidden(6), [RowSlice(0, 0, 6)])
        before = route.epoch
        await session.rollback([2])
        assert route.epoch == before + 1
        output_TD = await session.step(hidden(3), [RowSlice(0, 2, 3)])
        assert torch.equal(output_TD, hidden(3) + HOPS)
        assert session.recoveries == 0
        assert len(route.rebuilds) == 1


@pytest.mark.parametrize(
    ("mode", "version", "waits"),
    [
        ("chain", (1, 10), False),
        ("chain", (1, 9), True),
        ("star", (1, 9), False),
    ],
)
async def test_a_rollback_waits_only_for_old_nodes_of_a_chain(
    monkeypatch: pytest.MonkeyPatch, mode: Routing, version: tuple[int, int], waits: bool
) -> None:
    async with opened(monkeypatch, mode) as (session, route):
        await session.step(hidden(6), [RowSlice(0, 0, 6)])
        for link, node in zip(route.links, route.scripted, strict=True):
            link.opened = OpenedMessage(
                version=version, max_tokens=99, context_length=99, step_timeout_s=1.0
            )
            node.obeys_s = 0.2
        began = time.monotonic()
        await session.rollback([2])
        assert (time.monotonic() - began >= 0.2) == waits
        if mode == "star":
            output_TD = await session.step(hidden(3), [RowSlice(0, 2, 3)])
            assert torch.equal(output_TD, hidden(3) + HOPS)
        assert session.recoveries == 0


@pytest.mark.parametrize("mode", ROUTINGS)
async def test_what_was_rolled_back_is_not_sent_to_a_replacement(
    monkeypatch: pytest.MonkeyPatch, mode: Routing
) -> None:
    async with opened(monkeypatch, mode, deaths={0: 2}) as (session, route):
        await session.step(hidden(6), [RowSlice(0, 0, 6)])
        await session.rollback([2])
        await session.step(hidden(3), [RowSlice(0, 2, 3)])
        last_TD = torch.full((1, HIDDEN), 5.0)
        output_TD = await session.step(last_TD, [RowSlice(0, 5, 1)])
        assert torch.equal(output_TD, last_TD + HOPS)
        assert session.recoveries == 1
        sent = [
            (part.position, part.count) for step in route.scripted[0].steps for part in step.rows
        ]
        assert sent == [(0, 5), (5, 1)]


async def test_a_session_moves_off_the_nodes_that_others_are_faster_than(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch, "chain") as (session, route):
        slow = route.links[1].hop.peer_id

        async def to_leave(*_: object) -> frozenset[PeerId]:
            return frozenset({slow})

        monkeypatch.setattr(route.selector, "find_peers_to_leave", to_leave)
        await session._reconsider(session.hops, 0.1)
        slow_links = [link for link in route.links if link.state is LinkState.TOO_SLOW]
        assert [link.hop.peer_id for link in slow_links] == [slow]
