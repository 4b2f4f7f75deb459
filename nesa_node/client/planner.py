"""How a client chooses among nodes, with what it has learned of them in all its sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.client.decisions import describe
from nesa_node.client.request import RouteRequest
from nesa_node.client.surroundings import Surroundings
from nesa_node.compression import tensors
from nesa_node.core.decision_log import Decision, DecisionLog
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.avoidance import Avoidance
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Hop
from nesa_node.routing.claims import Claims
from nesa_node.routing.repair import fill_gaps
from nesa_node.routing.strategies import DEFAULT, make_strategy
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.tasks import TaskSet
from nesa_node.topology.links import Links
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

Hops = tuple[Hop, ...]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What chains are planned from: nodes, links, and how far the client is from each (ms)."""

    snapshot: Snapshot
    rtt_ms: Mapping[PeerId, float]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    hops: Hops
    asked: Request


class Planner:
    """Shared by the sessions of a client. `clock` returns seconds and never goes back."""

    def __init__(
        self,
        swarm: Swarm,
        strategy: str = DEFAULT,
        *,
        decisions: DecisionLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for a strategy that there is not."""
        self.strategy = make_strategy(strategy, np.random.default_rng())
        self._decisions = decisions
        self._writing = TaskSet()
        self.avoidance = Avoidance(clock)
        self.claims = Claims(clock)
        self.surroundings = Surroundings(swarm)

    async def view(self, snapshot: Snapshot, request: RouteRequest, *, may_ask: bool) -> View:
        """`snapshot` as far as it is believed. With `may_ask`, after pings where there is a choice.

        In a star everything passes the client: nodes are as far apart as their ways to it.
        """
        linked, rtt_ms = await self.surroundings.look(snapshot, request.span, may_ask=may_ask)
        nodes = tuple(self.claims.believed(node) for node in linked.nodes)
        if request.mode == "star":
            linked = replace(linked, links=_through_client(rtt_ms, [n.peer_id for n in nodes]))
        return View(replace(linked, nodes=nodes), rtt_ms)

    def plan(
        self,
        view: View,
        request: RouteRequest,
        keep: Sequence[Hop],
        *,
        exclude: frozenset[PeerId],
        min_free_tokens: int,
    ) -> Plan:
        """Hops that keep `keep`. Raises `MissingBlocksError`."""
        asked = replace(self.asked(view, request), exclude=exclude, min_free_tokens=min_free_tokens)
        hops = fill_gaps(view.snapshot, asked, keep, choose=self.strategy.choose)
        return Plan(hops, asked)

    def decided(self, session: bytes, reason: str, view: View, asked: Request, hops: Hops) -> None:
        """Write down why `session` got `hops`, while it goes on."""
        if self._decisions is not None and hops:
            self._writing.start(
                self._write(self._decisions, session, reason, view, asked, hops), name="decision"
            )

    async def close(self) -> None:
        """Let go of what is not written yet."""
        await self._writing.close()

    async def _write(
        self,
        decisions: DecisionLog,
        session: bytes,
        reason: str,
        view: View,
        asked: Request,
        hops: Hops,
    ) -> None:
        def write() -> None:
            body = describe(view.snapshot, asked, hops, self.strategy, reason)
            decisions.add(Decision("session", session.hex(), time.time(), body))

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            log.warning("decision_not_kept", reason=str(error))

    def asked(self, view: View, request: RouteRequest) -> Request:
        """What a decoded token of the session needs of a chain."""
        penalties_s = {
            node.peer_id: penalty_s
            for node in view.snapshot.nodes
            if (penalty_s := self.avoidance.penalty(node.peer_id)) > 0
        }
        return Request(
            span=request.span,
            bytes_per_token=request.hidden_size * tensors.DTYPES[request.dtype].itemsize,
            entry_rtt_ms=view.rtt_ms,
            penalties_s=penalties_s,
        )


def _through_client(rtt_ms: Mapping[PeerId, float], peers: Sequence[PeerId]) -> Links:
    links = Links.unknown(peers)
    rtt_ms_N = np.array([rtt_ms[peer] for peer in peers])
    rtt_ms_NN = rtt_ms_N[:, None] + rtt_ms_N[None, :]
    np.fill_diagonal(rtt_ms_NN, 0.0)
    return replace(links, rtt_ms_NN=rtt_ms_NN)
